"""Keywords that combine schemas: references, allOf, anyOf, oneOf, not, if."""

from __future__ import annotations

from typing import Any

from penstock.sampling.schema_not import Schema, assertions, negate
from penstock.sampling.schema_writer import Part, Path, Write, Writer

MAX_OPTIONS = 64  # of a oneOf or of cases, compared with each other
MAX_NEGATED = 256  # of a oneOf, each option within each other that it may match with


def write_reference(writer: Writer, work: Part, value: str, path: Path) -> None:
    if len(work.said) > 1:
        _add(work, "allOf", [writer.merged({"$ref": value}, work.path)])
        return
    found = writer.reference(value)
    work.written |= found if isinstance(found, dict) else {}
    work.require(found is not False)


def write_all_of(writer: Writer, work: Part, value: list[Any], path: Path) -> None:
    cases = _cases(writer, work, value)
    for place, one in enumerate(value):
        if not any(one is case for case in cases):
            _add(work, "allOf", [writer.merged(one, (*path, place), work.max_branches // work.num_branches)])
            work.num_branches *= writer.num_branches
    if cases:
        _write_cases(writer, work, cases, path)


def _add(work: Part, key: str, schemas: list[Any]) -> None:
    work.written[key] = [*work.written.get(key, ()), *schemas]


def write_any_of(writer: Writer, work: Part, value: list[Any], path: Path) -> None:
    write = writer.merged if len(work.said) > 1 else writer.schema
    options = [write(one, (*path, place)) for place, one in enumerate(value)]
    work.num_branches *= max(1, len(options))
    _add_options(work, options)


def _add_options(work: Part, options: list[Any]) -> None:
    """Where the keyword stands, if it can: the order of keywords is the order of properties."""
    if "anyOf" in work.written or not options:
        work.require({"anyOf": options} if options else False)
    else:
        work.written["anyOf"] = options


def write_one_of(writer: Writer, work: Part, value: list[Any], path: Path) -> None:
    """Where two options may match at once, each is taken without the other."""
    work.num_branches *= max(1, len(value))
    without = _without_each_other(writer, value)
    if without is None:
        writer.relax("oneOf", work.path, "more than one of its options may match")
        without = [[] for _ in value]
    options = []
    for place, (one, others) in enumerate(zip(value, without)):
        write = writer.merged if others or len(work.said) > 1 else writer.schema
        option = write(one, (*path, place))
        options.append({"allOf": [option, *(writer.schema(other, path) for other in others)]} if others else option)
    _add_options(work, options)


def _without_each_other(writer: Writer, options: list[Any]) -> list[list[Any]] | None:
    """For each option, schemas that rule out the others, as far as those are not ruled out by it."""
    without: list[list[Any]] = [[] for _ in options]
    if writer.apart.are_told_apart(options):
        return without
    if len(options) > MAX_OPTIONS:
        return None
    for place, one in enumerate(options):
        for other, two in enumerate(options[place + 1 :], place + 1):
            if not writer.apart.disjoint(one, two):
                without[place].append(negate(two, writer.follow))
                without[other].append(negate(one, writer.follow))
    negated = [one for each in without for one in each]
    return None if len(negated) > MAX_NEGATED or any(one is None for one in negated) else without


def write_not(writer: Writer, work: Part, value: Any, path: Path) -> None:
    negated = negate(value, writer.follow)
    if negated is None or not work.may_branch(len(negated.get("anyOf", ())) if isinstance(negated, dict) else 1):
        writer.relax("not", work.path)
    else:
        work.require(writer.schema(negated, path))


def write_if(writer: Writer, work: Part, value: Any, path: Path) -> None:
    """Both cases, each with what tells it from the other."""
    then, otherwise = work.said.get("then", True), work.said.get("else", True)
    if then is True and otherwise is True:
        return
    negated = True if then is True else negate(value, writer.follow)
    if negated is None:
        writer.relax("if", work.path, "the other case cannot be told apart")
        negated = True
    if negated is True and otherwise is True and then is not True:
        return
    if not work.may_branch(2):
        writer.relax("if", work.path, "there are too many cases")
        return
    met = [writer.schema(value, path), writer.schema(then, (*work.path, "then"))]
    unmet = [writer.schema(negated, path), writer.schema(otherwise, (*work.path, "else"))]
    work.require({"anyOf": [{"allOf": met}, {"allOf": unmet}]})


def _cases(writer: Writer, work: Part, parts: list[Any]) -> list[Schema]:
    """The if/then parts of an allOf, where no two of the conditions can be met at once."""
    cases = [part for part in parts if isinstance(part, dict) and set(assertions(part)) == {"if", "then"}]
    if not 1 < len(cases) <= MAX_OPTIONS:
        return []
    met = [_condition(work, case) for case in cases]
    apart = all(writer.apart.disjoint(one, two) for place, one in enumerate(met) for two in met[place + 1 :])
    return cases if apart and all(negate(case["if"], writer.follow) is not None for case in cases) else []


def _condition(work: Part, case: Schema) -> Any:
    """With all that the schema around it requires anyway."""
    around = {key: work.said[key] for key in ("type", "required") if key in work.said}
    return {"allOf": [around, case["if"]]}


def _write_cases(writer: Writer, work: Part, cases: list[Schema], path: Path) -> None:
    """One branch for each condition, and one for none of them."""
    options = [
        {"allOf": [writer.schema(_condition(work, case), path), writer.schema(case["then"], path)]} for case in cases
    ]
    none = [writer.schema(negate(case["if"], writer.follow), path) for case in cases]
    work.num_branches *= len(options) + 1
    work.require({"anyOf": [*options, {"allOf": none}]})


def leave(writer: Writer, work: Part, value: Any, path: Path) -> None:
    """Another keyword sees to this one."""


KEYWORDS: dict[str, Write] = {
    "$ref": write_reference,
    "allOf": write_all_of,
    "anyOf": write_any_of,
    "oneOf": write_one_of,
    "not": write_not,
    "if": write_if,
    "then": leave,
    "else": leave,
}
