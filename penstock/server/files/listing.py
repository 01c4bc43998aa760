"""Lists in pages, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from penstock.errors import shown
from penstock.server.errors import ApiError

MAX_DIGITS = 9
ORDERS = ("asc", "desc")
Listed = TypeVar("Listed")


def page_of(
    objects: Sequence[Listed],
    tell: Callable[[Listed], dict[str, Any]],
    asked: Mapping[str, str],
    max_listed: int,
    default: int,
    id_of: Callable[[Listed], str] = attrgetter("id"),
) -> dict[str, Any]:
    """The page of `objects`, the oldest of which comes first, that `after`, `limit` and `order` ask for. Only those on
    it are told."""
    order = asked.get("order", "desc")
    if order not in ORDERS:
        raise ApiError(
            400, f"order={shown(order)}: give one of {', '.join(ORDERS)}", param="order", code="invalid_value"
        )
    limit = asked.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= MAX_DIGITS and 1 <= int(limit) <= max_listed):
        raise ApiError(
            400, f"limit={shown(limit)}: give a number from 1 to {max_listed}", param="limit", code="invalid_value"
        )
    rest = list(objects if order == "asc" else reversed(objects))
    if asked.get("after"):
        ids = [id_of(one) for one in rest]
        if asked["after"] not in ids:
            raise ApiError(
                400, f"after={shown(asked['after'])} is none of the list's ids", param="after", code="invalid_value"
            )
        rest = rest[ids.index(asked["after"]) + 1 :]
    page = [tell(one) for one in rest[: int(limit)]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > len(page),
    }
