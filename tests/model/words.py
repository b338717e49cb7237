"""Builders of tiny tokenizers, one for each way in which a token's text depends on its neighbours.

``save_words`` puts one beside a tiny model's weights, where an engine finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2, as in the tiny models
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
PIECES = ("a", "b", "ab", "ba", "abc", ".", ",", "!", "é", "漢", "🙂")
SPACED = ("▁", "▁▁", "▁a", "▁ab", "▁the", "▁c.")


def _byte_level() -> Tokenizer:
    """Bytes and a few merges, as GPT-2, Llama 3 and the demo model have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("b", "a"), ("ab", "c"), ("Ġ", "a"), ("Ġ", "b"), ("ð", "Ł"), ("c", "Ã")]
    words = [*SPECIAL, *alphabet, *(first + second for first, second in merges)]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama2() -> Tokenizer:
    """Pieces that carry their space, bytes for the rest; the first space of all is stripped."""
    ids = {word: index for index, word in enumerate((*SPECIAL, *BYTES, *PIECES, *SPACED))}
    model = models.BPE(ids, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaces = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _metaspace() -> Tokenizer:
    """As sentencepiece's Unigram models."""
    words = [(word, -1.0) for word in (*SPECIAL, *BYTES, *PIECES, *SPACED)]
    tokenizer = Tokenizer(models.Unigram(words, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def _words() -> Tokenizer:
    """Whole words with spaces between them."""
    words = (*SPECIAL, *PIECES, "do", "n't", "'", "s", "'s")
    return Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))


# name -> how to make it; the names are what tests are parametrized with.
WORDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "llama-2": _llama2,
    "metaspace": _metaspace,
    "words": _words,
}


def words(name: str, clean_up: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of ``WORDS[name]``; clean_up: it removes spaces after it has decoded."""
    tokenizer = WORDS[name]()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=clean_up,
        **dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
    )


def save_words(folder: Path, name: str = "byte-level") -> PreTrainedTokenizerFast:
    """Save ``words(name)`` to ``folder`` and return it."""
    tokenizer = words(name)
    tokenizer.save_pretrained(folder)
    return tokenizer
