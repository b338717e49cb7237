"""SamplingParams: every value out of range is named."""

from __future__ import annotations

import pytest

from pagedraft.decoding.params import SamplingParams

BAD_PARAMS = {
    "no tokens": (ValueError, {"max_tokens": 0}, "max_tokens: expected an integer >= 1, got 0"),
    "float tokens": (TypeError, {"max_tokens": 1.5}, "max_tokens: expected an integer"),
    "negative temperature": (ValueError, {"temperature": -0.1}, "temperature: .*got -0.1"),
    "huge temperature": (ValueError, {"temperature": 10**400}, "temperature: expected from 0"),
    "stop ids as a number": (TypeError, {"stop_token_ids": 5}, "stop_token_ids: .*got 5"),
    "no stop ids": (TypeError, {"stop_token_ids": None}, "stop_token_ids: .*got None"),
    "nan temperature": (ValueError, {"temperature": float("nan")}, "temperature: .*got nan"),
    "top_k": (ValueError, {"top_k": -2}, "top_k: expected an integer >= -1, got -2"),
    "top_p of 0": (ValueError, {"top_p": 0}, "top_p: expected above 0 to 1, got 0"),
    "top_p above 1": (ValueError, {"top_p": 1.1}, "top_p: expected above 0 to 1, got 1.1"),
    "min_p": (ValueError, {"min_p": -0.1}, "min_p: expected from 0 to 1, got -0.1"),
    "repetition": (
        ValueError,
        {"repetition_penalty": 0},
        "repetition_penalty: expected from 1e-06",
    ),
    "presence": (ValueError, {"presence_penalty": 3}, "presence_penalty: expected from -2 to 2"),
    "frequency": (TypeError, {"frequency_penalty": "1"}, "frequency_penalty: expected a number"),
    "bias as a list": (TypeError, {"logit_bias": [5]}, "logit_bias: expected token ids to numb"),
    "bias of text": (TypeError, {"logit_bias": {"5": 1}}, "logit_bias: expected an integer"),
    "huge bias": (ValueError, {"logit_bias": {5: 101}}, r"logit_bias\[5\]: expected from -100 to"),
    "min_tokens": (ValueError, {"min_tokens": 17}, "min_tokens: expected an integer from 0 to 16"),
    "text temperature": (TypeError, {"temperature": "hot"}, "temperature: expected a number"),
    "negative seed": (ValueError, {"seed": -1}, "seed: .*got -1"),
    "wide seed": (ValueError, {"seed": 2**64}, "seed: expected an integer from 0 to"),
    "negative stop id": (ValueError, {"stop_token_ids": (-5,)}, "stop_token_ids: .*got -5"),
    "no samples": (ValueError, {"n": 0}, "n: expected an integer from 1 to 1024, got 0"),
    "negative k": (ValueError, {"k": -1}, "k: expected an integer >= 0, got -1"),
    "auto k": (TypeError, {"k": "auto"}, "k: expected an integer >= 0, got 'auto'"),
    "unknown rule": (ValueError, {"accept": "all"}, "accept: expected one of .*got 'all'"),
    "stop as a number": (TypeError, {"stop": 5}, "stop: expected text or a list of texts, got 5"),
    "stop ids as stop": (TypeError, {"stop": [5]}, "stop: expected text or a list of texts"),
    "empty stop": (ValueError, {"stop": ["a", ""]}, "stop: expected texts of at least one char"),
    "processor": (TypeError, {"logits_processors": [5]}, "logits_processors: expected callables"),
    "one processor": (TypeError, {"logits_processors": len}, "logits_processors: expected call"),
    "speculate by name": (TypeError, {"speculate": "off"}, "speculate: expected True or False"),
    "ignore_eos": (TypeError, {"ignore_eos": "no"}, "ignore_eos: expected True or False"),
    "many logprobs": (ValueError, {"logprobs": 21}, "logprobs: .*from 0 to 20, got 21"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_params_are_named(name):
    error, fields, message = BAD_PARAMS[name]
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_what_was_checked_stays():
    """Lists and mappings are copied: changing them later changes no parameters."""
    bias, stop, processors = {5: 1.0}, ["a", "a", "b"], [len]
    params = SamplingParams(logit_bias=bias, stop=stop, logits_processors=processors)
    bias[-1], stop[0] = float("nan"), ""
    processors.clear()
    assert params.logit_bias == {5: 1.0}
    assert params.stop == ("a", "b")
    assert params.logits_processors == (len,)
