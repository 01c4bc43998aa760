"""Models of the Hugging Face hub, in the hub's own cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import DownloadFailed, InvalidModel, PenstockError
from penstock.host.gguf_parts import all_parts, first_parts, model_files, parse_part
from penstock.hub.download_errors import Progress, Report, download_errors
from penstock.hub.names import RepositoryModel
from penstock.hub.store import Store

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PREFERRED = ("Q4_K_M", "Q8_0")
_POOLING = re.compile(r"\d+_\w+/config\.json")
_TEXT = (".json", ".txt", ".model", ".jinja")


def fetch_repository(source: RepositoryModel, store: Store, progress: Progress) -> Path:
    """Download the repository's newest files into the hub's cache; offline, use the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    with download_errors(str(source), Path(HF_HUB_CACHE), "HF_HOME"):
        try:
            files = _remote_files(source)
        except _Unreachable as error:
            return _find_cached(source, str(error))
        wanted = choose_files(str(source), files, source.file)
        folder = _download(source, wanted, progress)
    path = _model_path(folder, wanted)
    with download_errors(str(source), store.root), store.lock(str(source)):
        return store.record(str(source), path, {"commit": folder.name, "files": _sizes(path, folder, wanted)})


def forget(path: Path) -> None:
    """Delete the snapshot that contains `path` from the hub's cache."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir()
    commits = [
        revision.commit_hash
        for repository in cache.repos
        for revision in repository.revisions
        if path == revision.snapshot_path or revision.snapshot_path in path.parents
    ]
    if commits:
        cache.delete_revisions(*commits).execute()


def choose_files(name: str, files: list[str], wanted: str | None) -> list[str]:
    """Choose the files to download: safetensors with configuration and tokenizer, or one GGUF model, all its parts."""
    ggufs = first_parts(file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower())
    if wanted:
        return _with_parts(_choose_gguf(name, ggufs, wanted))
    weights = _choose_safetensors(files)
    if weights and "config.json" in files:
        return weights + [file for file in files if _is_text(file)]
    if ggufs:
        return _with_parts(_default_gguf(name, ggufs))
    if any(file.endswith(_PICKLES) for file in files):
        raise InvalidModel(
            f"{name} has only pickled weights, which can run code when loaded: choose a "
            "repository with safetensors or GGUF files, or convert it with save_pretrained()"
        )
    raise InvalidModel(f"{name} holds no model: it needs config.json with .safetensors files, or a .gguf file")


def _choose_safetensors(files: list[str]) -> list[str]:
    """Choose one copy of the weights: repositories may hold several variants."""
    found = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    shards = [file for file in found if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]
    return ["model.safetensors"] if "model.safetensors" in found else shards or found


def _is_text(file: str) -> bool:
    return file.endswith(_TEXT) and "/" not in file or bool(_POOLING.fullmatch(file))


def _with_parts(first: str) -> list[str]:
    path = PurePosixPath(first)
    return [str(path.with_name(name)) for name in all_parts(path.name)]


def _whole(file: str) -> str:
    """Return the name that a model in parts would have in one file."""
    part = parse_part(file)
    return part.whole if part else file


def _choose_gguf(name: str, ggufs: list[str], wanted: str) -> str:
    asked = parse_part(wanted)
    names = {wanted, str(replace(asked, number=1)) if asked else wanted}
    exact = [
        file
        for file in ggufs
        if names & {each for one in (file, _whole(file)) for each in (one, PurePosixPath(one).name)}
    ]
    label = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}\.gguf$", re.IGNORECASE)
    matches = exact or [file for file in ggufs if label.search(_whole(file))]
    if len(matches) != 1:
        listed = ", ".join(ggufs) or "none"
        raise InvalidModel(f"{name} names {len(matches)} of the repository's GGUF files: {listed}")
    return matches[0]


def _default_gguf(name: str, ggufs: list[str]) -> str:
    if len(ggufs) == 1:
        return ggufs[0]
    for label in _PREFERRED:
        matches = [file for file in ggufs if _whole(file).upper().endswith(f"{label}.GGUF")]
        if len(matches) == 1:
            return matches[0]
    raise InvalidModel(f"{name} holds {len(ggufs)} GGUF files; name one, as in {name}:FILE: {', '.join(ggufs)}")


class _Unreachable(Exception):
    pass


def _remote_files(source: RepositoryModel) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name = source.repository
    try:
        info = HfApi().model_info(name, revision=source.revision)
    except GatedRepoError as error:
        raise DownloadFailed(f"{name} is gated: accept its terms on the hub, and set HF_TOKEN to your token") from error
    except RevisionNotFoundError as error:
        raise DownloadFailed(f"{name} has no revision {source.revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise DownloadFailed(
            f"the Hugging Face hub has no model {name}, and no folder of that name is here; check the "
            "spelling, or set HF_TOKEN if it is private"
        ) from error
    except Exception as error:  # the hub's client changes its network library and errors between versions
        raise _Unreachable(_first_line(error)) from error
    return [entry.rfilename for entry in info.siblings or []]


def _download(source: RepositoryModel, files: list[str], progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = progress is not True and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        shown: dict[str, Any] = {"tqdm_class": _make_bar(source.repository, progress)} if callable(progress) else {}
        return Path(snapshot_download(source.repository, revision=source.revision, allow_patterns=files, **shown))
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DownloadFailed(f"cannot fetch {source}: {_first_line(error)}; try again") from error
    finally:
        if silenced:
            enable_progress_bars()


def _make_bar(label: str, report: Report) -> type[Any]:
    """Make a class of progress bars that tell a function how many bytes of all files have come, and show nothing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            is_network = str(options.pop("name", "")).endswith(".transfer")  # another bar counts what is written
            self._num_bytes, self._counts_bytes = 0, options.get("unit") == "B" and not is_network
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes and n:
                self._num_bytes += int(n)
                total = int(getattr(self, "total", None) or 0)
                report(label, self._num_bytes, max(total, self._num_bytes) if total else None)
            return bool(super().update(n))

    return Bar


def _find_cached(source: RepositoryModel, reason: str) -> Path:
    """Return what an earlier download left in the hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                source.repository, revision=source.revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
        present = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        return _model_path(folder, choose_files(str(source), present, source.file))
    except PenstockError:
        raise
    except Exception as error:
        raise DownloadFailed(
            f"cannot fetch {source}: the Hugging Face hub cannot be reached ({reason}) and the model "
            "is not in its cache; check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error


def _model_path(folder: Path, files: list[str]) -> Path:
    return folder / files[0] if files[0].lower().endswith(".gguf") else folder


def _sizes(path: Path, folder: Path, files: list[str]) -> dict[str, int]:
    if path != folder:
        return {file.name: file.stat().st_size for file in model_files(path)}
    return {file: (folder / file).stat().st_size for file in files}


def _first_line(error: Exception) -> str:
    lines: list[Any] = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
