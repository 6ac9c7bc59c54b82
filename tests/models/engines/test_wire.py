"""What goes over the wire to vLLM: what shapes a token is ours to say, whatever the model folder says."""

import contextlib
import io
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import ProbeScore, Sampling, WeightVersion
from hpc_swe.models.engines import _answers
from hpc_swe.models.engines._answers import Answer, SampleAnswer, TokenScores, probe_distance, to_routing
from hpc_swe.models.engines._vllm.gate import SAMPLE
from hpc_swe.models.engines.base import Prefix
from hpc_swe.models.engines.vllm import Vllm

SHAPING = {"temperature", "top_p", "top_k", "min_p", "max_tokens"}
OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
HARMLESS = {"stop_token_ids", "logprobs", "detokenize"}


@pytest.mark.parametrize(
    ("experts", "device", "message"),
    [(0, "gpu", "has 0"), (256, "gpu", "1 to 255 experts; the model has 256"), (8, "cpu", "needs a GPU")],
)
def test_an_engine_that_cannot_return_its_experts_is_refused(
    tmp_path: Path, experts: int, device: str, message: str
) -> None:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    shape = dict.fromkeys(names, 8) | {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_experts": experts}
    shape |= {"intermediate_size": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    shape |= {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3_moe"}))
    engine = Vllm(device=device, return_routing=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        engine.check_model(tmp_path, 64)


@pytest.mark.parametrize(
    ("differences", "passes"),
    [
        ([0.9] * 30, True),
        ([0.1] * 28 + [9.0] * 2, True),  # rounding of unlikely tokens
        ([0.1] * 28 + [11.0] * 2, False),
        ([1.1] * 30, False),
        ([0.1] * 24 + [2.0] * 6, False),
        ([0.1] * 29 + [float("nan")], False),
    ],
)
def test_a_probe_bounds_most_differences_and_the_largest(differences: list[float], passes: bool) -> None:
    assert (probe_distance(differences, [0.0] * 30) <= 1.0) is passes


def routing(experts: object, dtype: type = np.uint8) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(experts, dtype))
    return file.getvalue()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "start it with --enable-return-routed-experts"),
        (b"AAAA", "read the routing"),
        (routing([[[1, 2]], [[3, 4]]], np.uint16), "type uint16"),
        (routing([[1, 2]]), r"shape \(1, 2\)"),
        (routing(1), r"shape \(\)"),
        (routing([[[1, 2]]] * 3), r"of 2 tokens has type uint8 and shape \(3, 1, 2\)"),
        (routing([[[1, 2]]]), "of 2 tokens has 1"),
        (routing([[[0, 0]], [[0, 0]]]), "captures no experts"),
    ],
)
def test_a_routing_that_cannot_be_trusted_is_refused(answer: bytes | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        to_routing(Answer([3], [-0.5], "length", routed_experts=answer), 2)
    good = Answer([3], [-0.5], "length", routed_experts=routing([[[1, 2]], [[3, 4]]]))
    assert to_routing(good, 2).tolist() == [[1, 2], [3, 4]]
    aborted = Answer([3], [-0.5], "abort", routed_experts=routing([[[1, 2]]]))
    assert to_routing(aborted, 2).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("sampled", "prompt"),
    [
        (TokenScores.of([3], [-0.5]), TokenScores.of([6], [-1.0])),
        (TokenScores.of([3, 5], [-0.5, -0.25]), TokenScores.of([6], [-1.0])),
        (TokenScores.of([3, 4], [-0.5]), TokenScores.of([6], [-1.0])),
        (TokenScores.of([3, 4], [-0.5, -0.25]), TokenScores.of([7], [-1.0])),
        (TokenScores.of([3, 4], [-0.5, -0.25]), TokenScores.of([], [])),
        (TokenScores(b"three", b""), None),
    ],
)
def test_log_probabilities_of_other_tokens_are_refused(
    sampled: TokenScores, prompt: TokenScores | None
) -> None:
    def read(sampled: TokenScores, prompt: TokenScores | None) -> Answer:
        answer = SampleAnswer([3, 4], sampled, "stop", prompt)
        return _answers.from_samples("url", msgspec.msgpack.encode(answer), [5, 6])

    with pytest.raises(EngineError, match="log-probabilities"):
        read(sampled, prompt)
    good = read(TokenScores.of([3, 4], [-0.5, -0.1]), TokenScores.of([6], [-1.0]))
    assert (good.logprobs, good.prompt_logprobs) == ([-0.5, -0.1], [-1.0])


@pytest.mark.parametrize("data", [b"{}", b'{"choices": []}', b'{"choices": "\xff"}', b"\xc1", b""])
def test_an_unreadable_answer_is_an_engine_error(data: bytes) -> None:
    for read in (_answers.from_samples, _answers.from_completions):
        with pytest.raises(EngineError, match="url: unreadable answer: "):
            read("url", data, [5, 6])


class Listener(BaseHTTPRequestHandler):
    """Keeps what it was asked, and answers with one token; below /foreign as a vLLM of somebody else."""

    asked: list[dict] = []
    paths: list[str] = []

    def do_POST(self) -> None:
        self.paths.append(self.path)
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        data = msgspec.msgpack.encode(SampleAnswer([3], TokenScores.of([3], [-0.5]), "length"))
        if self.path.startswith("/foreign"):
            choice = {"token_ids": [3], "finish_reason": "length", "logprobs": {"token_logprobs": [-0.5]}}
            rows = [None, {"6": {"logprob": -1.0}, "9": {"logprob": -0.25}}]
            data = json.dumps({"choices": [choice | {"prompt_logprobs": rows}]}).encode()
        self.send_response(404 if self.path.startswith(f"/foreign{SAMPLE}") else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)])
def test_every_setting_that_shapes_a_token_is_sent_and_no_other(url: str, sampling: Sampling) -> None:
    completion = Vllm().generate(url, "t", np.asarray([5, 6]), sampling, 60.0)
    assert (completion.token_ids, completion.logprobs, completion.spans) == ([3], [-0.5], None)
    sent = Listener.asked[-1]
    assert sent.keys() == {"token_ids", "sampling_params"}
    assert sent["token_ids"] == [5, 6]
    settings = sent["sampling_params"]
    assert {name: settings[name] for name in SHAPING} == {name: getattr(sampling, name) for name in SHAPING}
    assert {name: settings[name] for name in OFF} == OFF
    assert settings.keys() == SHAPING | OFF.keys() | HARMLESS


@pytest.mark.parametrize("route", ["", "/foreign"])
def test_only_an_engine_that_keeps_caches_is_told_whose_they_are(url: str, route: str) -> None:
    for kv_on_update, salt in (("keep", "v000001-i01"), ("recompute", None)):
        Vllm(kv_on_update=kv_on_update).generate(
            f"{url}{route}", "t", np.asarray([5, 6]), Sampling(), 60.0, Prefix(salt="v000001-i01")
        )
        assert Listener.asked[-1].get("cache_salt") == salt


def test_an_engine_of_somebody_else_is_asked_by_vllm_s_route(url: str) -> None:
    completion = Vllm().generate(f"{url}/foreign", "t", np.asarray([5, 6]), Sampling(), 60.0)
    assert (completion.token_ids, completion.logprobs, completion.spans) == ([3], [-0.5], None)
    assert Vllm().score(f"{url}/foreign", "t", [5, 6]) == [-1.0]
    assert Listener.paths[-1] == "/foreign/v1/completions?probe"
    assert Listener.asked[-1]["return_token_ids"]
    assert Listener.asked[-1]["return_tokens_as_token_ids"], "or it would need a tokenizer"
    assert "detokenize" not in Listener.asked[-1]
    for prompt in ([5, 7], [5, 6, 7]):
        with pytest.raises(EngineError, match=f"do not match its {len(prompt)} token ids"):
            Vllm().score(f"{url}/foreign", "t", prompt)


def test_the_model_s_own_generation_settings_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = list(Vllm(program="vllm").command(tmp_path, "h", 1, "run", 64))
    assert command[command.index("--generation-config") + 1] == "vllm"


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_cached_keys_and_values_are_of_the_configured_type(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = Vllm(program="vllm", kv_cache_dtype=kind)  # type: ignore[arg-type]
    command = list(engine.command(tmp_path, "h", 1, "run", 64))
    assert command[command.index("--kv-cache-dtype") + 1] == kind


def test_weights_of_8_bits_are_vllms_own_in_every_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = Vllm(program="vllm", dtype="fp8_e4m3")
    for command in (engine.command(tmp_path, "h", 1, "run", 64), engine.serving(tmp_path, "run", 64)):
        assert "--dtype bfloat16 --quantization fp8_per_channel" in " ".join(command)


def test_logits_are_rounded_unless_they_are_asked_for_in_float32(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = [Vllm(program="vllm", head_dtype=kind) for kind in ("auto", "float32")]
    rounded, exact = (list(each.command(tmp_path, "h", 1, "run", 64)) for each in given)
    assert "--hf-overrides" not in rounded
    assert exact[exact.index("--hf-overrides") + 1] == '{"head_dtype":"float32"}'
    with pytest.raises(ConfigError, match="head_dtype = 'float32' would be lost"):
        Vllm(head_dtype="float32", extra=["--hf-overrides={}"])


def test_files_of_mistral_s_own_library_are_not_taken(tmp_path: Path) -> None:
    """Left to choose, vLLM takes params.json and consolidated.safetensors; a learner reads neither."""
    (tmp_path / "config.json").write_text("{}")
    command = list(Vllm(program="vllm").command(tmp_path, "h", 1, "run", 64))
    assert command[command.index("--config-format") + 1] == "hf"
    assert command[command.index("--load-format") + 1] == "safetensors"


def test_an_engine_behind_a_gateway_is_asked_by_tls_below_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", "key.pem"]
    made += ["-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = HTTPServer(("127.0.0.1", 0), Listener)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"https://localhost:{server.server_port}/models/ours"
    try:
        with pytest.raises(EngineError, match="certificate verify failed"):
            Vllm().generate(url, "t", np.asarray([5, 6]), Sampling(), 60.0)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        completion = Vllm().generate(url, "t", np.asarray([5, 6]), Sampling(), 60.0)
    finally:
        server.shutdown()
        server.server_close()
    assert completion.token_ids == [3]
    assert Listener.paths[-1].startswith("/models/ours/")


@pytest.mark.parametrize(
    ("dtype", "difference", "passes"),
    [("float32", 0.0005, True), ("float32", 0.07, False), ("bfloat16", 0.07, True), ("auto", 0.3, False)],
)
def test_an_engine_of_16_bits_may_differ_from_an_exact_learner(
    url: str, dtype: str, difference: float, passes: bool
) -> None:
    probe = ProbeScore(token_ids=[5, 6], logprobs=[-1.0 - difference], tolerance=1e-3)
    engine = Vllm(dtype=dtype)  # type: ignore[arg-type]
    refusal = pytest.raises(EngineError, match="differ from the learner's by")
    with contextlib.nullcontext() if passes else refusal:
        engine.adopt(f"{url}/foreign", "t", WeightVersion(), probe)
