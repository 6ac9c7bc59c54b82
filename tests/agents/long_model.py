"""A tiny random Qwen3 whose context holds an agent's whole session, and a tokenizer of this repository."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jobs.make_model import CONTROL, MARKS, TEMPLATE, save_tokenizer

CONTEXT = 32768
VOCABULARY = 4096


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL + MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    root = Path(__file__).parents[2]
    texts = [path.read_text() for path in sorted(root.glob("docs/*.md")) + sorted(root.glob("hpc_swe/*.py"))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in MARKS])
    return tokenizer


def make_model(folder: Path) -> Path:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_tokenizer(tokenizer, folder)
    end, pad = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            initializer_range=0.05,
            eos_token_id=end,
            pad_token_id=pad,
            dtype="float32",
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    return folder
