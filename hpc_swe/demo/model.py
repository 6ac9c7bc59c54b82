"""Make a tiny Qwen3 for the demo: python -m hpc_swe.demo.model --out DIR.

The tokenizer is trained on the demonstrations of the bug tasks, so that their JSON punctuation becomes single
tokens; the weights are random. The result is an ordinary Hugging Face model folder.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hpc_swe.agents.chat.template import ChatTemplate
from hpc_swe.base import cli, loader
from hpc_swe.base.records import Message

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY = 512
CONVERSATIONS = 1500
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "dtype": "float32",
}
# A run of JSON punctuation around a quote; indentation; words; digits; comparisons; line ends.
# Operators stand apart from spaces, so that they are the same token in code and in a call's arguments.
WORDS = r'[{}",: ]*"[{}",: ]*| {2,}| ?[A-Za-z]+|[0-9]|[<>=]=|\n *|[^\sA-Za-z0-9]|\s'
TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def make(
    folder: Path,
    conversations: Iterable[Sequence[Message]],
    seed: int,
    words: str = WORDS,
    **sizes: object,
) -> str:
    """Make the model's folder, completely or not at all, with a tokenizer for these conversations.

    Return the numbers of its parameters and of its tokens.
    """
    made = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = make_tokenizer(texts(made, conversations), words=words)
    with _errors_of_the_file_system(made):
        save_tokenizer(tokenizer, made)
        parameters = save_model(tokenizer, made, seed, **sizes)
    for path in made.iterdir():
        path.chmod(0o644)  # save_pretrained lets only their owner read the weights
    made.rename(folder)
    return f"{parameters:,} parameters, {tokenizer.get_vocab_size()} tokens"


@contextmanager
def _errors_of_the_file_system(folder: Path) -> Iterator[None]:
    """Raise OSError where tokenizers or safetensors name its number at the end of a text only."""
    try:
        yield
    except Exception as error:  # tokenizers has no class of its own
        found = re.search(r"\(os error (\d+)\)$", str(error))
        if not found:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(folder)) from None


def texts(folder: Path, conversations: Iterable[Sequence[Message]]) -> Iterator[str]:
    """Yield the texts between the control tokens of conversations rendered by the folder's template."""
    template = ChatTemplate(folder, {})
    split = re.compile("|".join(map(re.escape, CONTROL + MARKS)))
    for messages in conversations:
        yield from split.split(template.render(messages, "", generate=False).text)


def make_tokenizer(samples: Iterable[str], vocabulary: int = VOCABULARY, words: str = WORDS) -> Tokenizer:
    """Train a byte-level BPE with Qwen3's control tokens; as there, the marks are not special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(words), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL + MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in MARKS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files for `AutoTokenizer`."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_model(tokenizer: Tokenizer, folder: Path, seed: int, **sizes: object) -> int:
    """Write random weights and return their number; `sizes` replace those of SIZES."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    end, pad = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    torch.manual_seed(seed)
    config = Qwen3Config(
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
        **{"vocab_size": tokenizer.get_vocab_size()} | SIZES | sizes,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32 if config.dtype == torch.float32 else torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    disable_progress_bar()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@cli.command
def main() -> None:
    """Make the folder that the command line names."""
    what = (
        "Make a Qwen3 for the demo, with random weights and a tokenizer of its own, as a Hugging Face folder."
    )
    parser = cli.parser("hpc_swe.demo.model", what, "--out models/tiny", "--out own/model --context 4096")
    parser.add_argument("--out", type=cli.path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights")
    context = SIZES["max_position_embeddings"]
    parser.add_argument("--context", type=int, default=context, help="longest conversation in tokens")
    parser.add_argument(
        "--taskset",
        type=json.loads,
        default='{"type": "bugs"}',
        help="table [taskset], as JSON, of whose words the tokenizer makes tokens",
    )
    options = cli.parse(parser)
    taskset = loader.load("tasksets", options.taskset)
    conversations = itertools.islice(taskset.demonstrations(seed=0), CONVERSATIONS)
    size = make(options.out, conversations, options.seed, max_position_embeddings=options.context)
    print(f"{options.out}: {size}")


if __name__ == "__main__":
    main()
