"""The real vLLM, against transformers."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import EngineTime, ProbeScore, Sampling, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.models.engines._vllm.gate import HOLD, RELEASE, SAMPLE
from hpc_swe.models.engines.base import NEW, Completion, Prefix, Weights
from hpc_swe.models.engines.vllm import Vllm
from tests.kit.engine_kit import (
    CPU,
    EOS,
    TOKEN,
    V0,
    VOCABULARY,
    make_model,
    make_run,
    publish,
    publish_adapters,
    publish_delta,
    serving,
    verified,
)
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
TEXT = list(range(40, 90))
PLAIN = Sampling(max_tokens=40)


class Server(NamedTuple):
    url: str
    run: RunDir
    models: dict[str, Path]
    steps: Iterator[int]

    def publish(self, model: str, **options: object) -> Weights:
        """Publish a next version with the weights of a model, and verify it."""
        version = WeightVersion(step=next(self.steps))
        publish(self.run, self.models[model], version, **options)  # type: ignore[arg-type]
        return verified(self.run, version)

    def reload(
        self, model: str, late: Callable[[Path], None] = lambda _: None, **options: object
    ) -> WeightVersion:
        """Publish, verify and load a next version; `late` is called before it is loaded."""
        weights = self.publish(model, **options)
        late(weights.folder)
        CPU.reload(self.url, TOKEN, weights)
        return weights.version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("vllm")
    models = {name: make_model(root / name, seed) for name, seed in (("a", 0), ("b", 1))}
    models["stops"] = make_model(root / "stops", 0, stops=True)
    with serving(CPU, models["a"], root / "engine.log") as url:
        yield Server(url, make_run(root / "run"), models, iter(range(1, 1000)))


@pytest.fixture
def fresh(server: Server) -> Server:
    """The server with model a."""
    server.reload("a")
    return server


def reference(model: Path, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probabilities of the completion by transformers in float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.no_grad():
        logits = Qwen3ForCausalLM.from_pretrained(model)(torch.tensor([prompt + completion])).logits[0]
    table = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return table.gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


def sample(
    server: Server, prompt: list[int], sampling: Sampling = PLAIN, engine: Vllm = CPU, prefix: Prefix = NEW
) -> Completion:
    return engine.generate(server.url, TOKEN, np.asarray(prompt, np.int32), sampling, 180.0, prefix)


@pytest.mark.parametrize("name", ["a", "b"])
def test_sampled_logprobs_are_those_of_transformers(server: Server, name: str) -> None:
    version = server.reload(name)
    rng = np.random.default_rng(0)
    for length in (1, 17, 300):
        prompt = rng.integers(10, VOCABULARY, length).tolist()
        found = sample(server, prompt)
        wanted = reference(server.models[name], prompt, found.token_ids)
        assert np.abs(wanted - np.asarray(found.logprobs)).max() < 1e-4
        assert found.spans == [(0, len(found.token_ids), version)]
        text = prompt + found.token_ids
        scores = CPU.score(server.url, TOKEN, text)
        assert np.abs(reference(server.models[name], text[:1], text[1:]) - np.asarray(scores)).max() < 1e-4


def test_an_answer_says_what_each_stage_took_and_what_was_cached(fresh: Server) -> None:
    prompt = np.random.default_rng(1).integers(10, VOCABULARY, 600).tolist()
    sample(fresh, TEXT)
    began = time.monotonic()
    first = sample(fresh, prompt).stages
    time.sleep(1.0)
    again = sample(fresh, prompt).stages
    passed_s = time.monotonic() - began
    assert first.cached_tokens == 0 < again.cached_tokens < 600 == again.prompt_tokens
    assert 0 <= first.queue_s < first.prefill_s + first.decode_s
    assert min(first.prefill_s, first.decode_s) > 0
    spent = first.engine + again.engine
    assert spent.idle_s > 1.0
    assert min(spent.prefill_s, spent.decode_s) > spent.full_s == spent.paused_s == 0
    assert spent.prefill_s + spent.decode_s + spent.idle_s < passed_s + 1.0


def test_an_engine_says_how_long_requests_waited_for_room(tmp_path: Path) -> None:
    """Its cache holds three of eight conversations, so that some are put back and computed again."""
    tight = msgspec.structs.replace(CPU, kv_cache_bytes=3 << 20, head_dtype="float32")  # vLLM knows it
    prompts = np.random.default_rng(0).integers(10, VOCABULARY, (8, 400)).tolist()
    with serving(tight, make_model(tmp_path / "model", 0), tmp_path / "engine.log") as url:
        server = Server(url, make_run(tmp_path / "run"), {}, iter(()))
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda prompt: sample(server, prompt, Sampling(max_tokens=400)), prompts)
        spent = sum((each.stages.engine for each in found), EngineTime())
        page = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60).text
    [preempted] = re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", page, re.MULTILINE)
    assert float(preempted) > 0
    assert 0 < spent.full_s <= spent.decode_s
    assert spent.paused_s == 0


def test_temperature_0_is_greedy(fresh: Server) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    ids = sample(fresh, TEXT, Sampling(temperature=0.0, max_tokens=20)).token_ids
    model = Qwen3ForCausalLM.from_pretrained(fresh.models["a"])
    with torch.no_grad():
        best = model(torch.tensor([TEXT + ids])).logits[0].argmax(-1)
    assert best[len(TEXT) - 1 : -1].tolist() == ids


def test_the_token_that_ends_a_turn_is_returned_with_its_logprob(server: Server) -> None:
    server.reload("stops")
    found = [sample(server, [prompt, *TEXT]) for prompt in range(20)]
    stopped = [completion for completion in found if completion.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS
        assert len(completion.logprobs) == len(completion.token_ids)
        assert EOS not in completion.token_ids[:-1]


def test_stop_tokens_of_the_configuration_end_a_turn(fresh: Server) -> None:
    low = Vllm(stop_token_ids=list(range(100, VOCABULARY // 2)))
    found = sample(fresh, TEXT, engine=low)
    assert found.finish_reason == "stop"
    assert 100 <= found.token_ids[-1] < VOCABULARY // 2 or found.token_ids[-1] == EOS


def swapped_midway(server: Server, engine: Vllm) -> tuple[WeightVersion, list[tuple[list[int], Completion]]]:
    """Load weights b while prompts are answered with weights a; return what both have sampled in turn."""
    server.reload("a")
    weights = server.publish("b")
    answers: list[tuple[list[int], Completion]] = []
    is_over = threading.Event()

    def ask(first: int) -> None:
        while not is_over.is_set():
            prompt = [first, *TEXT]
            length = Sampling(max_tokens=40 * first)  # all at once would end together, with none under way
            answers.append((prompt, sample(server, prompt, length)))

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask, first) for first in range(10, 16)]
        try:
            until(lambda: len(answers) > 6, "the engine has answered")
            engine.reload(server.url, TOKEN, weights)
        finally:
            is_over.set()
    assert not [future.exception() for future in asking if future.exception()]
    return weights.version, [(p, c) for p, c in answers if c.spans is not None and len(c.spans) == 2]


def deviations(server: Server, model: str, prompt: list[int], completion: Completion) -> np.ndarray:
    """How far each recorded log-probability is from that of a model in transformers."""
    recorded = np.asarray(completion.logprobs)
    return np.abs(reference(server.models[model], prompt, completion.token_ids) - recorded)


def test_a_swap_in_mid_generation_is_stamped_token_by_token(server: Server) -> None:
    new, found = swapped_midway(server, CPU)
    assert found
    for prompt, completion in found:
        assert completion.spans is not None
        (start, middle, _), (again, end, version) = completion.spans
        assert (start, again, end, version) == (0, middle, len(completion.token_ids), new)
        assert deviations(server, "a", prompt, completion)[:middle].max() < 1e-3
        assert deviations(server, "b", prompt, completion)[middle:].max() < 1e-3


def test_kept_caches_go_on_with_the_new_weights(server: Server) -> None:
    """Requests survive, and their later tokens are sampled from keys and values of both weights."""
    new, found = swapped_midway(server, msgspec.structs.replace(CPU, kv_on_update="keep"))
    after = []
    for prompt, completion in found:
        assert completion.spans is not None
        (_, middle, _), (_, _, version) = completion.spans
        assert version == new
        assert deviations(server, "a", prompt, completion)[:middle].max() < 1e-3
        after.append(deviations(server, "b", prompt, completion)[middle:].max())
    assert max(after) > 1e-2


def test_a_chain_that_begins_after_a_swap_finds_no_cache_of_older_weights(server: Server) -> None:
    """One that began before goes on with its own."""
    keep = msgspec.structs.replace(CPU, kv_on_update="keep")
    prompt = np.random.default_rng(0).integers(10, VOCABULARY, 600).tolist()
    old = Prefix(salt=server.reload("a").name)
    sample(server, prompt, engine=keep, prefix=old)
    weights = server.publish("b")
    keep.reload(server.url, TOKEN, weights)
    goes_on, begins = (
        sample(server, prompt, engine=keep, prefix=prefix)
        for prefix in (old, Prefix(salt=weights.version.name))
    )
    assert deviations(server, "b", prompt, goes_on).max() > 1e-2
    assert deviations(server, "b", prompt, begins).max() < 1e-3


def edit(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    """Damage done before the checksums were taken: only a look inside finds it."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # no longer mapped
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def corrupt(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


NORM = "model.layers.1.input_layernorm.weight"
INSIDE = {
    "missing": (lambda t: t.pop(NORM), rf"{NORM} is missing \(1 tensors"),
    "shape": (lambda t: t.update({NORM: t[NORM][:-1].clone()}), rf"{NORM} is \[63\], not \[64\]"),
    "type": (lambda t: t.update({NORM: t[NORM].bfloat16()}), rf"{NORM} is bfloat16, not float32"),
    "unknown": (lambda t: t.update(more=t[NORM].clone()), r"model.safetensors: more is \[64\], not None"),
}


def expect_refusal(server: Server, load: Callable[[], object], message: str) -> None:
    def state() -> object:
        spans = sample(server, TEXT, Sampling(max_tokens=1)).spans
        return CPU.score(server.url, TOKEN, TEXT), spans

    before = state()
    with pytest.raises(EngineError, match=message):
        load()
    assert state() == before
    server.reload("b")  # and the next good version is taken


def test_a_shard_that_changed_since_it_was_verified_is_refused_by_name(fresh: Server) -> None:
    message = "v0.*model.safetensors: it is no longer the file that was verified"
    expect_refusal(fresh, lambda: fresh.reload("b", late=corrupt), message)


@pytest.mark.parametrize("kind", INSIDE)
def test_a_wrong_tensor_is_refused_by_name(fresh: Server, kind: str, tmp_path: Path) -> None:
    change, message = INSIDE[kind]
    (tmp_path / "bad").mkdir()
    for path in fresh.models["b"].iterdir():
        (tmp_path / "bad" / path.name).write_bytes(path.read_bytes())
    edit(change)(tmp_path / "bad")
    fresh.models["bad"] = tmp_path / "bad"
    expect_refusal(fresh, lambda: fresh.reload("bad", listed=fresh.models["b"]), message)


def test_a_folder_without_weights_is_refused(fresh: Server) -> None:
    bare = fresh.publish("b")
    (bare.folder / "model.safetensors").unlink()
    expect_refusal(fresh, lambda: CPU.reload(fresh.url, TOKEN, bare), "no .*safetensors")


def test_deltas_give_the_same_log_probabilities_as_the_full_weights(fresh: Server, tmp_path: Path) -> None:
    """Also when the engine skips one of them, and with one whose digests are not those of its chain."""

    def alter(seed: int) -> Path:
        (folder := tmp_path / str(seed)).mkdir()
        tensors = load_file(fresh.models["a"] / "model.safetensors")
        for name, tensor in tensors.items():
            tensor.view(-1)[seed :: 3 if "up_proj" in name else 1 if "norm" in name else 41] *= 1 + 0.2 * seed
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    models = [fresh.models["a"], alter(1), alter(2), alter(3)]
    versions = [WeightVersion(step=next(fresh.steps)) for _ in range(5)]
    publish(fresh.run, models[0], versions[0])
    chain = [verified(fresh.run, versions[0])]
    for index in (1, 2, 3):
        pair = (models[index - 1], models[index])
        chain.append(publish_delta(fresh.run, pair, versions[index], chain[-1]))

    def scores(weights: Weights) -> list[float]:
        CPU.reload(fresh.url, TOKEN, weights)
        return CPU.score(fresh.url, TOKEN, TEXT)

    expected = []
    for index in (1, 3):
        fresh.models["altered"] = models[index]
        fresh.reload("altered")
        expected.append(CPU.score(fresh.url, TOKEN, TEXT))
    assert np.abs(np.asarray(expected[0]) - expected[1]).max() > 0.01
    assert scores(chain[1]) == expected[0]
    assert scores(chain[3]) == expected[1]
    wrong = publish_delta(fresh.run, (models[1], models[2]), versions[4], chain[3])
    expect_refusal(fresh, lambda: scores(wrong), "its digest is not the manifest's")


def test_adapters_of_another_model_leave_the_weights_before(fresh: Server) -> None:
    """The model's files changed after the learner had read them, and then are what they were."""
    model = fresh.models["a"] / "model.safetensors"
    versions = [WeightVersion(step=next(fresh.steps)) for _ in range(2)]
    publish_adapters(fresh.run, fresh.models["a"], versions[0])
    publish_adapters(fresh.run, fresh.models["a"], versions[1])
    base, whole = Weights(V0, fresh.models["a"]), model.read_bytes()
    CPU.reload(fresh.url, TOKEN, verified(fresh.run, versions[0], base))
    scores = CPU.score(fresh.url, TOKEN, TEXT)
    model.write_bytes((fresh.models["b"] / "model.safetensors").read_bytes())
    try:
        with pytest.raises(EngineError, match="restore the files of `model` as they were"):
            CPU.reload(fresh.url, TOKEN, verified(fresh.run, versions[1], base))
    finally:
        model.write_bytes(whole)
    assert CPU.score(fresh.url, TOKEN, TEXT) == scores
    CPU.reload(fresh.url, TOKEN, verified(fresh.run, versions[1], base))
    assert CPU.score(fresh.url, TOKEN, TEXT) == scores


def test_weights_that_fail_their_probe_never_stamp_a_token(fresh: Server) -> None:
    before = sample(fresh, TEXT).spans
    assert before is not None
    scores = CPU.score(fresh.url, TOKEN, TEXT)
    probe = ProbeScore(token_ids=TEXT, logprobs=scores, tolerance=1e-3)
    outcomes: list[Completion | EngineError] = []
    is_over = threading.Event()

    def generate() -> None:
        while not is_over.is_set():
            try:
                outcomes.append(sample(fresh, TEXT, Sampling(max_tokens=20)))
            except EngineError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(EngineError, match="differ from the learner's by"):
        fresh.reload("b", probe=probe)
    is_over.set()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, EngineError):
            assert "failed their probe" in str(outcome)
        else:
            assert outcome.spans == [(0, len(outcome.token_ids), before[0][2])]
    assert any(isinstance(outcome, EngineError) for outcome in outcomes), "answers of these weights came"
    assert CPU.score(fresh.url, TOKEN, TEXT) == scores
    fresh.reload("a", probe=probe)


def test_a_probe_does_not_wait_for_prompts_to_be_computed_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Sixteen long prompts wait at the swap, and a forward pass takes one or two of them."""
    server.reload("b")
    probe = ProbeScore(token_ids=TEXT, logprobs=CPU.score(server.url, TOKEN, TEXT), tolerance=1e-3)
    server.reload("a")
    answered: list[float] = []
    is_over = threading.Event()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not is_over.is_set():
            prompt = rng.integers(10, VOCABULARY, 1500).tolist()
            sample(server, prompt, Sampling(max_tokens=1))
            answered.append(time.time())

    with ThreadPoolExecutor(16) as pool, caplog.at_level(logging.DEBUG, "hpc_swe.models.engines"):
        asking = [pool.submit(ask, seed) for seed in range(16)]
        until(lambda: len(answered) > 16, "the engine has answered each thread")
        server.reload("b", probe=probe)
        until(lambda: len(answered) > 64, "the requests that were kept are answered")
        is_over.set()
    ended = [record.created for record in caplog.records if record.msg.startswith("paused")]
    compared = [record.created for record in caplog.records if record.msg.startswith("compared")]
    assert not [future.exception() for future in asking if future.exception()]
    assert sum(ended[0] < at < compared[0] for at in answered) < 8, "answers meanwhile"


def test_every_route_but_health_needs_the_token(server: Server) -> None:
    own = {"Authorization": f"Bearer {TOKEN}"}
    schema = httpx.get(f"{server.url}/openapi.json", headers=own, timeout=600).json()
    routes = [(path, method) for path, methods in schema["paths"].items() for method in methods]
    routes += [("/openapi.json", "get"), ("/docs", "get"), ("/metrics", "get"), ("/nowhere", "get")]
    routes += [(path, "post") for path in (SAMPLE, HOLD, RELEASE)]
    assert ("/collective_rpc", "post") in routes
    assert ("/update_weights", "post") in routes
    for path, method in routes:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            status = httpx.request(method, server.url + path, headers=headers, timeout=600).status_code
            assert status == (200 if path == "/health" else 401), (method, path)


def test_a_prompt_that_is_too_long_is_an_engine_error(server: Server) -> None:
    with pytest.raises(EngineError, match="HTTP 400"):
        sample(server, [7] * 2100)
    assert sample(server, TEXT).token_ids


@pytest.mark.skipif(find_spec("numba") is not None, reason="numba is installed")
def test_without_numba_a_start_with_speculation_says_what_to_install(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"speculation = 'ngram': .* numba"):
        msgspec.structs.replace(CPU, speculation="ngram").check_model(server.models["a"], 64)


def test_a_missing_model_folder_names_path_and_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"\[engine\] model = '{tmp_path}/none'"):
        CPU.command(tmp_path / "none", "127.0.0.1", 1, "test", 64)
