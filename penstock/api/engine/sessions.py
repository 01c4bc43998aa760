"""Sessions of an LLM: put into the store with their tokens, found in it again, and given up."""

from __future__ import annotations

from penstock.api.prompts import AnyLora
from penstock.api.service import Batch, Service
from penstock.engine.executor import EraseSession, SaveSession
from penstock.errors import EngineFailed, InvalidRequest, quote
from penstock.host.session_records import SessionRecord, SessionRecords, digest_scope
from penstock.types import SamplingParams

DEFAULT_S = 600.0


class SavedSessions:
    """Sessions by name: those of SamplingParams(session=…), and saved ones, of this process or an earlier one."""

    def __init__(self, service: Service, records: SessionRecords) -> None:
        self._service, self._records = service, records

    def _name(self, name: str) -> str:
        assembly = self._service.assembly
        return f"{assembly.spec.architecture} {assembly.spec.vocab_size} {assembly.num_bytes} {name}"

    def save(self, name: str) -> int:
        """Put all of a session into the store, so that it outlives this process; returns its tokens."""
        answer = self._service.engine.control(SaveSession("", name))
        if answer.error is not None:
            raise InvalidRequest(f"session={quote(name)}: {answer.error}")
        found = answer.values
        if not found["num_positions"]:
            raise InvalidRequest(f"there is no session {quote(name)}: finish a request with it first")
        record = SessionRecord(tuple(found["tokens"]), digest_scope(found["loras"], found["salt"]))
        try:
            self._records.write("", self._name(name), record)
        except OSError as error:
            raise EngineFailed(
                f"session={quote(name)} cannot be saved ({error.strerror or error}): make kv_offloading_path a folder "
                "that you alone may read, and can write"
            ) from None
        return len(record.tokens)

    def restore(
        self, name: str, *, session_ttl: float = DEFAULT_S, lora_request: AnyLora = None, cache_salt: str = ""
    ) -> int:
        """Have a saved session in the cache again; returns how many of its tokens were found, in the cache or the
        store. Others, and up to a block at its end, are computed."""
        record = self._records.read("", self._name(name))
        if record is None:
            raise InvalidRequest(f"no session {quote(name)} was saved from this model: save it first")
        service = self._service
        tokens = list(record.tokens[: service.intake.max_model_len - 1])
        prompt = {"prompt_token_ids": tokens, **({"cache_salt": cache_salt} if cache_salt else {})}
        encoded = service.intake.encode(prompt)
        loras = [(use.name, use.scale) for use in service.loras.resolve(lora_request)]
        if digest_scope(loras, encoded.salt) != record.scope:
            raise InvalidRequest(
                f"session {quote(name)} was saved with other adapters or another cache_salt: give the same"
            )
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, session=name, session_ttl=session_ttl)
        batch = Batch(service, [encoded], [params], loras=[lora_request])
        batch.finish(False)
        batch.raise_failure()
        return batch.collectors[0].output().num_cached_tokens or 0

    def erase(self, name: str) -> int:
        """Give a session up, saved or not; returns its tokens."""
        answer = self._service.engine.control(EraseSession("", name))
        record = self._records.erase("", self._name(name))
        count = max(int(answer.values["num_positions"]), len(record.tokens) if record else 0)
        if not count:
            raise InvalidRequest(f"there is no session {quote(name)}: finish a request with it first")
        return count
