"""Runs OpenVINO GenAI in the interpreter of another environment; imports nothing of this project.

``python openvino_child.py MODEL THREADS KV_TYPE`` writes one JSON object a line to its standard
output: first its facts, then an answer to each request that it reads from its standard input:
{"prompts": [[ids]], "num_tokens": n, "mode": "plain" or "lookup"} gives {"token_ids", "seconds",
"first_seconds"}, or {"error"}. It ends with its input.
"""

import json
import os
import sys
import time

import numpy
import openvino
import openvino_genai

NUM_LOOKED_UP = 8
LONGEST_NGRAM = 3


class Pipelines:
    """A pipeline a mode, made when first asked for."""

    def __init__(self, model, properties):
        self.model, self.properties = model, properties
        self.made, self.num_requests = {}, 0

    def get(self, mode):
        """The continuous batching pipeline of a mode."""
        if mode not in self.made:
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            extra = {"prompt_lookup": True} if mode == "lookup" else {}
            self.made[mode] = openvino_genai.ContinuousBatchingPipeline(
                self.model, scheduler, "CPU", {**self.properties, **extra}
            )
        return self.made[mode]

    def run(self, prompts, num_tokens, mode):
        """Decode all prompts at once; a step makes a token of each, or more with lookup."""
        pipeline = self.get(mode)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        if mode == "lookup":
            config.num_assistant_tokens = NUM_LOOKED_UP
            config.max_ngram_size = LONGEST_NGRAM
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        token_ids: list[list[int]] = [[] for _ in prompts]
        first_seconds = [0.0 for _ in prompts]
        began = time.perf_counter()
        handles = []
        for tensor in inputs:
            handles.append(pipeline.add_request(self.num_requests, tensor, config))
            self.num_requests += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        if not token_ids[row]:
                            first_seconds[row] = time.perf_counter() - began
                        token_ids[row].extend(output.generated_ids)
        seconds = time.perf_counter() - began
        return {"token_ids": token_ids, "seconds": seconds, "first_seconds": first_seconds}


def main():
    """Serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print goes to the log
    model, threads, kv_type = sys.argv[1:4]
    properties = {"INFERENCE_NUM_THREADS": int(threads), "KV_CACHE_PRECISION": kv_type}
    pipelines = Pipelines(model, properties)
    pipelines.get("plain")
    core = openvino.Core()
    precision = core.get_property("CPU", "INFERENCE_PRECISION_HINT")
    facts = {
        "version": openvino_genai.__version__,
        "openvino": openvino.__version__,
        "inference_precision": precision.get_type_name(),
        "capabilities": list(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        "properties": properties,
        "lookup": f"{NUM_LOOKED_UP} tokens, n-grams up to {LONGEST_NGRAM}",
    }
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        try:
            answer = pipelines.run(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
