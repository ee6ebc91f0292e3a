from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import gelu
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from wamrl_torchrl.modules.fastwam.text import (
    TEMPLATE,
    encode_prompts,
    encoder_files,
    load_text_encoder,
    load_tokenizer,
    tokenizer_files,
    wan_encoder_config,
    wan_names,
)

HEADS, LAYERS, LENGTH = 4, 3, 16
WORDS = ["a", "video", "robot's", "point", "of", "view", "the", "put", "red", "blue", "block", "on", "plate"]
PROMPTS = ["put the red block on the plate", "a video", "the robot's view of the blue block"]


def make_encoder(seed: int = 0, **sizes) -> UMT5EncoderModel:
    """Tiny umT5 whose every weight is random, norms and position biases too."""
    config = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 6, "num_heads": HEADS, "num_layers": LAYERS, **sizes}
    encoder = UMT5EncoderModel(UMT5Config(**config, is_encoder_decoder=False, use_cache=False)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return encoder


def wan_tensors(encoder: UMT5EncoderModel) -> dict[str, Tensor]:
    """Weights of an encoder in Wan's naming."""
    state = encoder.state_dict()
    return {wan: state[own].clone() for wan, own in wan_names(encoder.config.num_layers).items()}


def save_encoder(encoder: UMT5EncoderModel, path: Path) -> Path:
    """Write an encoder: .pth and .safetensors in Wan's naming, without a suffix a Hugging Face directory."""
    if path.suffix == ".pth":
        torch.save(wan_tensors(encoder), path)
    elif path.suffix == ".safetensors":
        save_file(wan_tensors(encoder), path)
    else:
        encoder.save_pretrained(path)
    return path


def save_tokenizer(directory: Path, words: list[str] = WORDS) -> Path:
    """Write a tokenizer of whole words that ends a text with </s>, as umT5's does."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    tokenizer.save_pretrained(directory)
    return directory


def wan_encode(tensors: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """The encoder as published (T5 with a position bias per layer), written on Wan's tensor names; float64."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"{name}.weight"]

    # Relative positions: 16 buckets per direction, of which 8 are exact and 8 logarithmic up to 128.
    offset = torch.arange(ids.shape[1]) - torch.arange(ids.shape[1])[:, None]
    distance = offset.abs()
    far = 8 + (torch.log(distance.clamp(min=1) / 8) / math.log(128 / 8) * 8).long()
    bucket = torch.where(distance < 8, distance, far.clamp(max=15)) + 16 * (offset > 0)

    x = tensors["token_embedding.weight"][ids]
    for i in range(LAYERS):
        weight = {
            name.removeprefix(f"blocks.{i}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"blocks.{i}.")
        }
        y = normed(x, f"blocks.{i}.norm1")
        q, k, v = ((y @ weight[f"attn.{n}"].mT).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        scores = q @ k.mT + weight["pos_embedding.embedding"][bucket].permute(2, 0, 1)
        attention = scores.masked_fill(mask[:, None, None] == 0, -torch.inf).softmax(-1) @ v
        x = x + attention.transpose(1, 2).flatten(2) @ weight["attn.o"].mT
        y = normed(x, f"blocks.{i}.norm2")
        gate = gelu(y @ weight["ffn.gate.0"].mT, approximate="tanh")
        x = x + (gate * (y @ weight["ffn.fc1"].mT)) @ weight["ffn.fc2"].mT
    return normed(x, "norm")


@pytest.fixture(scope="module")
def encoder() -> UMT5EncoderModel:
    return make_encoder()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class TestLoad:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["encoder", "encoder.pth"])
    def test_every_file_gives_the_same_encodings(self, tmp_path, tokenizer, encoder, name, dtype):
        loaded = load_text_encoder(save_encoder(encoder, tmp_path / name), device="cpu", dtype=dtype)
        expected = encode_prompts(make_encoder().to(dtype), tokenizer, PROMPTS, length=LENGTH)
        assert loaded.dtype == dtype
        assert torch.equal(encode_prompts(loaded, tokenizer, PROMPTS, length=LENGTH), expected)

    @pytest.mark.parametrize("name", ["encoder", "encoder.pth"])
    def test_frozen_and_on_its_device(self, tmp_path, encoder, name):
        loaded = load_text_encoder(save_encoder(encoder, tmp_path / name), device="cpu")
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}
        assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}
        assert loaded.shared.weight is loaded.encoder.embed_tokens.weight

    def test_a_whole_umt5_lends_its_encoder(self, tmp_path, tokenizer, encoder):
        directory = save_encoder(encoder, tmp_path / "whole")
        tensors = load_file(directory / "model.safetensors")
        tensors |= {"decoder.final_layer_norm.weight": torch.ones(32), "lm_head.weight": torch.zeros(64, 32)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        loaded = load_text_encoder(directory, device="cpu", dtype=torch.float32)
        expected = encode_prompts(encoder, tokenizer, PROMPTS, length=LENGTH)
        assert torch.equal(encode_prompts(loaded, tokenizer, PROMPTS, length=LENGTH), expected)

    def test_names_mean_what_wan_means(self, tmp_path, encoder):
        """Against the published architecture written on Wan's names: a swapped pair of matrices would show."""
        path = save_encoder(encoder, tmp_path / "encoder.pth")
        loaded = load_text_encoder(path, device="cpu", dtype=torch.float32)
        ids = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(1))
        mask = torch.arange(40) < torch.tensor([40, 7, 23])[:, None]
        found = loaded(ids, attention_mask=mask.long()).last_hidden_state
        expected = wan_encode(torch.load(path), ids, mask)
        torch.testing.assert_close(found[mask], expected[mask].float(), atol=1e-4, rtol=1e-4)

    def test_full_size(self):
        """umT5-xxl: its parameters, and the size of the released safetensors file to the byte."""
        square, norm = [4096, 4096], [4096]
        shapes = {"token_embedding": [256384, 4096], "embedding": [32, 64], "norm": norm, "norm1": norm, "norm2": norm}
        shapes |= {"q": square, "k": square, "v": square, "o": square}
        shapes |= {"0": [10240, 4096], "fc1": [10240, 4096], "fc2": [4096, 10240]}
        names = wan_names(24)
        shape = {name: shapes[name.split(".")[-2]] for name in names}
        tensors = {name: torch.empty(shape[name], dtype=torch.bfloat16, device="meta") for name in names}
        config = wan_encoder_config(tensors, source="xxl")
        with torch.device("meta"):
            model = UMT5EncoderModel(config)
        assert {names[name]: tensor.shape for name, tensor in tensors.items()} == {
            key: value.shape for key, value in model.state_dict().items() if key != "encoder.embed_tokens.weight"
        }
        assert sum(tensor.numel() for tensor in tensors.values()) == 5_680_910_336
        header, end = {}, 0
        for name in sorted(tensors):
            begin, end = end, end + 2 * tensors[name].numel()
            header[name] = {"dtype": "BF16", "shape": shape[name], "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"))
        assert 8 + math.ceil(len(text) / 8) * 8 + end == 11_361_845_432

    @pytest.mark.parametrize("name", ["encoder", "encoder.safetensors"])
    def test_tensors_that_do_not_fit_are_named_as_in_the_file(self, tmp_path, encoder, name):
        path = save_encoder(encoder, tmp_path / name)
        file, block = path, "blocks.1.ffn"
        up, gate = f"{block}.fc1.weight", f"{block}.gate.0.weight"
        if path.is_dir():
            file, block = path / "model.safetensors", "encoder.block.1.layer.1.DenseReluDense"
            up, gate = f"{block}.wi_1.weight", f"{block}.wi_0.weight"
        tensors = load_file(file)
        del tensors[up]
        save_file({**tensors, f"{block}.x": torch.zeros(48), gate: torch.zeros(48, 31)}, file, {"format": "pt"})
        shape = rf"{gate} has shape \(48, 31\), expected \(48, 32\)"
        message = rf"{path} does not fit a umT5 encoder: {up} is missing; {block}.x is unexpected; {shape}$"
        with pytest.raises(ValueError, match=message):
            load_text_encoder(path, device="cpu")

    @pytest.mark.parametrize("name", ["encoder.pth", "encoder"])
    def test_damaged_file(self, tmp_path, encoder, name):
        path = save_encoder(encoder, tmp_path / name)
        file = path / "model.safetensors" if path.is_dir() else path
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(ValueError, match=f"cannot read .*{path}"):
            load_text_encoder(path, device="cpu")

    def test_file_of_another_model(self, tmp_path):
        torch.save({"conv.weight": torch.zeros(2)}, tmp_path / "other.pth")
        with pytest.raises(ValueError, match=r"no umT5 encoder in Wan's naming.*holds \['conv.weight'\]"):
            load_text_encoder(tmp_path / "other.pth", device="cpu")

    def test_directory_of_another_model(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "ti2v"}')
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ValueError, match="model_type 'ti2v', expected 'umt5'"):
            load_text_encoder(tmp_path, device="cpu")
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config.json is not the configuration"):
            load_text_encoder(tmp_path, device="cpu")

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no text encoder .*nowhere.*models_t5_umt5-xxl"):
            load_text_encoder(tmp_path / "nowhere", device="cpu")
        with pytest.raises(FileNotFoundError, match=r"has no config.json"):
            encoder_files(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors"):
            encoder_files(tmp_path)

    def test_other_dtype(self, tmp_path):
        with pytest.raises(ValueError, match=r"got torch\.float16"):
            load_text_encoder(tmp_path, device="cpu", dtype=torch.float16)

    @pytest.mark.parametrize("name", ["encoder", "encoder.pth"])
    def test_without_transformers(self, tmp_path, encoder, monkeypatch, name):
        path = save_encoder(encoder, tmp_path / name)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r"pip install 'wamrl_torchrl\[wan\]'"):
            load_text_encoder(path, device="cpu")


class TestTokenizer:
    def test_files(self, tmp_path):
        save_tokenizer(tmp_path)
        (tmp_path / "spiece.model").touch()
        assert [path.name for path in tokenizer_files(tmp_path)] == ["tokenizer.json", "tokenizer_config.json"]

    def test_file_is_used_as_it_is(self, tmp_path):
        """Labelled T5Tokenizer as by Wan, with umT5's byte fallback and special tokens, which that class has not."""
        pieces = [(token, 0.0) for token in ("<pad>", "</s>", "<s>", "<unk>")]
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
        pieces += [("▁robot", -5.0), ("'", -4.0), ("s", -4.0), ("▁", -3.0)]
        backend = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=True))
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        backend.save(str(tmp_path / "tokenizer.json"))
        names = {"tokenizer_class": "T5Tokenizer", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**names, "extra_ids": 0}))
        text = "robot's é"
        expected = [260, 261, 262, 263, 4 + 0xC3, 4 + 0xA9, 1]
        assert load_tokenizer(tmp_path)(text)["input_ids"] == expected

    def test_bad_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"tokenizer.json; pass the directory google/umt5-xxl"):
            load_tokenizer(tmp_path)
        save_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        with pytest.raises(ValueError, match=r"no padding token.*tokenizer_config.json"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=f"cannot read the tokenizer in {tmp_path}"):
            load_tokenizer(tmp_path)

    def test_without_transformers(self, tmp_path, monkeypatch):
        save_tokenizer(tmp_path)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r"pip install 'wamrl_torchrl\[wan\]'"):
            load_tokenizer(tmp_path)


class TestEncode:
    def test_padding_is_zero_and_the_rest_is_not(self, encoder, tokenizer):
        contexts = encode_prompts(encoder, tokenizer, PROMPTS, length=LENGTH)
        assert contexts.shape == (3, LENGTH, 32)
        assert contexts.dtype == torch.float32
        tokens = torch.tensor([len(prompt.split()) + 1 for prompt in PROMPTS])
        assert torch.equal((contexts != 0).any(-1), torch.arange(LENGTH) < tokens[:, None])

    def test_padding_is_not_attended_to(self, encoder, tokenizer):
        short = encode_prompts(encoder, tokenizer, PROMPTS[1:2], length=3)
        padded = encode_prompts(encoder, tokenizer, PROMPTS[1:2], length=LENGTH)
        torch.testing.assert_close(padded[:, :3], short, atol=1e-5, rtol=1e-5)

    def test_independent_of_the_batch(self, encoder, tokenizer):
        together = encode_prompts(encoder, tokenizer, PROMPTS, length=LENGTH)
        alone = torch.cat([encode_prompts(encoder, tokenizer, [prompt], length=LENGTH) for prompt in PROMPTS])
        backwards = encode_prompts(encoder, tokenizer, PROMPTS[::-1], length=LENGTH).flip(0)
        in_parts = encode_prompts(encoder, tokenizer, PROMPTS, length=LENGTH, batch_size=2)
        for other in (alone, backwards, in_parts):
            torch.testing.assert_close(other, together, atol=1e-5, rtol=1e-5)

    def test_word_order_and_words_matter(self, encoder, tokenizer):
        prompts = ["red on blue", "blue on red", "red on plate"]
        contexts = encode_prompts(encoder, tokenizer, prompts, length=LENGTH)
        distance = torch.cdist(contexts.flatten(1), contexts.flatten(1)) + torch.eye(3)
        assert distance.min() > 0.1

    def test_white_space_is_collapsed(self, encoder, tokenizer):
        contexts = encode_prompts(encoder, tokenizer, ["put  the\n red ", "put the red"], length=LENGTH)
        assert torch.equal(contexts[0], contexts[1])

    def test_template(self):
        task = "put the bowl on the plate"
        expected = f"A video recorded from a robot's point of view executing the following instruction: {task}"
        assert TEMPLATE.format(task=task) == expected

    def test_progress_and_batches_are_bounded(self, encoder, tokenizer):
        steps = []
        encode_prompts(
            encoder, tokenizer, PROMPTS, length=LENGTH, batch_size=2, progress=lambda step, _: steps.append(step)
        )
        assert steps == [2, 1]

    def test_too_long_a_prompt_is_refused(self, encoder, tokenizer):
        tokens = len(PROMPTS[0].split()) + 1
        encode_prompts(encoder, tokenizer, PROMPTS[:1], length=tokens)
        with pytest.raises(ValueError, match=rf"'{PROMPTS[0]}' has {tokens} tokens.*length={tokens - 1}"):
            encode_prompts(encoder, tokenizer, PROMPTS, length=tokens - 1)

    def test_no_prompts(self, encoder, tokenizer):
        with pytest.raises(ValueError, match="no prompts"):
            encode_prompts(encoder, tokenizer, [])

    def test_tokenizer_of_another_encoder(self, tokenizer):
        with pytest.raises(ValueError, match="token 16, the encoder only knows 10"):
            encode_prompts(make_encoder(vocab_size=10), tokenizer, ["point of view of the plate"], length=LENGTH)

    def test_broken_weights_show(self, tokenizer):
        encoder = make_encoder()
        with torch.no_grad():
            encoder.shared.weight[tokenizer.get_vocab()["blue"]] = torch.nan
        with pytest.raises(ValueError, match=rf"{PROMPTS[2]}.*not finite"):
            encode_prompts(encoder, tokenizer, PROMPTS, length=LENGTH)
