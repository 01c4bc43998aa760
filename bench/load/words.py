"""English-like text of about so many tokens, from a seed."""

from __future__ import annotations

import random

# Tokens per word of `passage`, its points included, as SmolLM2's tokenizer counts it; others of its size are near.
TOKENS_PER_WORD = 1.10
SAMPLE_WORDS = 400  # of the text that a server's tokenizer is tried on
WORDS = """
about above across after again against air all along also always among answer apple arm around ask autumn away back
bag bank bear bed before begin behind bell below best better between bird black blue boat body book both bottle bread
break bridge bring brother build burn business butter buy call camp car care carry castle cat catch chair change cheap
child church city clear clock close cloud coat cold come common cook copper corner cotton count country cover cup cut
dark daughter day deep desk dinner doctor dog door down dream dress drink drive drop dry dust ear early earth east
easy edge egg eight empty end engine enough even evening every example eye face fall family far farm fast father feel
few field fight figure fill find fine finger fire first fish five floor flower fly follow food foot forest forget four
free fresh friend front fruit full game garden gate gentle girl give glass gold good grain grass great green ground
group grow half hand happy hard hat head hear heart heavy help high hill hold home horse hot hour house hundred ice
idea important inside iron island join journey keep key kind king kitchen know lake land language large last late
laugh lead learn leave left letter library light line list little long look lose loud love low machine make many map
market mean measure meat meet metal middle milk mind minute money month moon more morning mother mountain mouth move
much music name narrow near never new night nine north note nothing number ocean offer office often oil old open
orange order other outside over page paint paper part pass past pay peace people perhaps picture piece plan plant play
please point poor pot power press price problem public pull push question quick quiet rain reach read ready reason red
remember rest rice rich ride right ring river road rock roof room round rule run safe salt same sand say school sea
season second see seed sell send seven shape sharp ship shirt shoe shop short show side silver simple sing sister six
sky sleep slow small smile smoke snow soft song soon sound south speak spring square stand star start station stay
steel step still stone story street strong summer sun sure sweet swim table tail take talk tall teach ten thick thin
thing think thousand three through ticket time together tomorrow tool tooth town train tree true turn twenty two under
until useful valley very village visit voice wait walk wall warm wash watch water way weather week well west wheel
white wide wild wind window winter wire wish woman wonder wood word work world write yard year yellow yesterday young
""".split()


class Text:
    """A source of passages; the same seed gives the same passages."""

    def __init__(self, seed: str, tokens_per_word: float = TOKENS_PER_WORD) -> None:
        self._source = random.Random(seed)
        self._tokens_per_word = tokens_per_word

    def passage(self, num_tokens: int, end: str = ".") -> str:
        """Sentences of 6 to 14 words, about `num_tokens` in all."""
        return self.words(max(1, round(num_tokens / self._tokens_per_word)), end)

    def words(self, count: int, end: str = ".") -> str:
        sentences = []
        while count:
            length = min(count, self._source.randint(6, 14))
            sentences.append(" ".join(self._source.choices(WORDS, k=length)).capitalize())
            count -= length
        return ". ".join(sentences) + end
