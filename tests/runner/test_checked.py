"""`--device auto` takes a GPU for models that the GPU's own tests run, and for no others."""

from __future__ import annotations

from penstock.models.spec import FAMILIES
from penstock.runner.cuda.gpu import CHECKED
from tests.gpu.shapes import SHAPES


def test_what_is_called_checked_is_checked() -> None:
    assert set(CHECKED) <= set(SHAPES) and len(set(CHECKED)) == len(CHECKED)


def test_every_family_has_a_shape_for_a_gpu() -> None:
    assert set(SHAPES) == {name for name, family in FAMILIES.items() if not family.cpu_only} and all(SHAPES.values())
