from __future__ import annotations

import sys

import pytest
import torch
from safetensors import safe_open

from tests.modules.test_text import make_encoder, save_encoder, save_tokenizer
from wamrl_torchrl import context_cli
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS
from wamrl_torchrl.modules.fastwam import text
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.context_cache import read_context_cache, write_context_cache

LENGTH = 40
FIRST = ["put the red block on the plate", "point now"]


@pytest.fixture
def files(tmp_path):
    """A text encoder, a tokenizer that knows the template and the table top, and where the cache goes."""
    save_encoder(make_encoder(), tmp_path / "encoder.pth")
    words = text.TEMPLATE.lower().split() + " ".join([*TABLETOP_INSTRUCTIONS, *FIRST]).split()
    save_tokenizer(tmp_path / "tokenizer", list(dict.fromkeys(words)))
    return tmp_path


@pytest.fixture
def wamrl_context(monkeypatch, capsys):
    """Run the command; returns (exit status or message, what it printed in 200 columns)."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["wamrl-context", *map(str, arguments)])
        code: object = 0
        try:
            context_cli.main()
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def build(files, wamrl_context):
    def call(*what, encoder="encoder.pth", tokenizer="tokenizer", length=LENGTH, dtype="float32") -> tuple[object, str]:
        paths = ("--text-encoder", files / encoder, "--tokenizer", files / tokenizer, "--out", files / "c.safetensors")
        return wamrl_context("build", *paths, "--device", "cpu", "--length", length, "--dtype", dtype, *what)

    return call


@pytest.fixture
def encoded(monkeypatch):
    """Prompts of every run of the text encoder."""
    found: list[list[str]] = []
    encode = text.encode_prompts

    def counted(encoder, tokenizer, prompts, **options):
        found.append(list(prompts))
        return encode(encoder, tokenizer, prompts, **options)

    monkeypatch.setattr(text, "encode_prompts", counted)
    return found


class TestBuild:
    def test_rows_are_the_encodings_of_the_prompts(self, files, build):
        code, printed = build("--instruction", *FIRST)
        assert code == 0
        assert "2 contexts, 2 of them new" in printed
        encoder = text.load_text_encoder(files / "encoder.pth", device="cpu", dtype=torch.float32)
        tokenizer = text.load_tokenizer(files / "tokenizer")
        prompts = [
            f"A video recorded from a robot's point of view executing the following instruction: {instruction}"
            for instruction in FIRST
        ]
        expected = text.encode_prompts(encoder, tokenizer, prompts, length=LENGTH)
        assert torch.equal(ContextBank.from_cache(files / "c.safetensors", FIRST).contexts, expected)

    def test_bfloat16_and_128_positions_by_default(self, files, wamrl_context):
        paths = ("--text-encoder", files / "encoder.pth", "--tokenizer", files / "tokenizer", "--out", files / "c")
        assert wamrl_context("build", *paths, "--instruction", "point")[0] == 0
        contexts = read_context_cache(files / "c").contexts
        assert contexts.shape == (1, 128, 32)
        assert contexts.dtype == torch.bfloat16

    def test_what_the_rows_depend_on_is_recorded(self, files, build):
        build("--instruction", *FIRST)
        cache = read_context_cache(files / "c.safetensors")
        assert list(cache.encoder) == ["encoder.pth"]
        assert list(cache.tokenizer) == ["tokenizer.json", "tokenizer_config.json"]
        assert cache.versions["torch"] == [torch.__version__]
        assert cache.template == text.TEMPLATE
        save_encoder(make_encoder(1), files / "encoder.pth")
        build("--instruction", *FIRST, "--overwrite")
        other = read_context_cache(files / "c.safetensors")
        assert other.encoder != cache.encoder
        assert other.tokenizer == cache.tokenizer
        assert not torch.equal(other.contexts, cache.contexts)

    def test_tabletop_repeats_and_extra_instructions(self, files, build):
        code, _ = build("--tabletop", "--instruction", TABLETOP_INSTRUCTIONS[1], "--instruction", "point", "point")
        assert code == 0
        assert read_context_cache(files / "c.safetensors").instructions == (*TABLETOP_INSTRUCTIONS, "point")

    @pytest.mark.libero
    def test_suites(self, files, build):
        from wamrl_torchrl.envs.libero_suites import instructions

        assert build("--suite", "libero_spatial", "libero_goal", length=64)[0] == 0
        expected = instructions("libero_spatial") + instructions("libero_goal")
        assert read_context_cache(files / "c.safetensors").instructions == tuple(expected)

    def test_again_is_up_to_date(self, files, build, encoded):
        build("--instruction", *FIRST)
        before, content = (files / "c.safetensors").stat().st_mtime_ns, (files / "c.safetensors").read_bytes()
        code, printed = build("--instruction", FIRST[1])
        assert code == 0
        assert "up to date: 2 contexts" in printed
        assert len(encoded) == 1, "the encoder ran again"
        assert (files / "c.safetensors").stat().st_mtime_ns == before
        assert (files / "c.safetensors").read_bytes() == content

    def test_new_instructions_extend(self, files, build, encoded):
        build("--instruction", *FIRST)
        before = read_context_cache(files / "c.safetensors").contexts.clone()
        code, printed = build("--instruction", "block on plate", FIRST[0])
        assert code == 0
        assert "3 contexts, 1 of them new" in printed
        assert [len(prompts) for prompts in encoded] == [2, 1], "only what is new is encoded"
        cache = read_context_cache(files / "c.safetensors")
        assert cache.instructions == (*FIRST, "block on plate")
        assert torch.equal(cache.contexts[:2], before)
        build("--instruction", *FIRST, "block on plate", "--overwrite")
        torch.testing.assert_close(read_context_cache(files / "c.safetensors").contexts, cache.contexts)

    def test_versions_of_an_extended_file_add_up(self, files, build, monkeypatch):
        build("--instruction", FIRST[0])
        monkeypatch.setattr(context_cli.metadata, "version", lambda name: "99.0")
        build("--instruction", FIRST[1])
        assert read_context_cache(files / "c.safetensors").versions["torch"] == [torch.__version__, "99.0"]

    def test_another_name_is_not_another_encoder(self, files, build):
        build("--instruction", *FIRST)
        (files / "encoder.pth").rename(files / "umt5.pth")
        code, printed = build("--instruction", *FIRST, encoder="umt5.pth")
        assert code == 0
        assert "up to date" in printed

    @pytest.mark.parametrize("other", ["text encoder", "tokenizer", "template", "length", "dtype"])
    def test_other_origin_is_refused_unless_overwritten(self, files, build, monkeypatch, other):
        build("--instruction", *FIRST)
        before = (files / "c.safetensors").read_bytes()
        options = {"length": {"length": LENGTH + 1}, "dtype": {"dtype": "bfloat16"}}.get(other, {})
        if other == "text encoder":
            save_encoder(make_encoder(1), files / "encoder.pth")
        elif other == "tokenizer":
            (files / "tokenizer" / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
        elif other == "template":
            monkeypatch.setattr(text, "TEMPLATE", "a video of {task}")
        code, _ = build("--instruction", FIRST[0], **options)
        assert str(code).splitlines()[0] == (
            f"wamrl-context: {files / 'c.safetensors'} was made with another {other}: pass --overwrite to replace it, "
            "or write to another file with --out"
        )
        assert (files / "c.safetensors").read_bytes() == before
        assert build("--instruction", FIRST[0], "--overwrite", **options)[0] == 0
        assert read_context_cache(files / "c.safetensors").instructions == (FIRST[0],)

    def test_overwrite_mends_a_damaged_file(self, files, build):
        (files / "c.safetensors").write_bytes(b"damaged")
        code, _ = build("--instruction", *FIRST)
        assert str(code).startswith(f"wamrl-context: cannot read the context cache {files / 'c.safetensors'}")
        assert build("--instruction", *FIRST, "--overwrite")[0] == 0
        assert read_context_cache(files / "c.safetensors").instructions == tuple(FIRST)


class TestMistakes:
    """Each is one line that starts with the name of the command, and leaves no file."""

    @pytest.mark.parametrize(
        ("what", "options", "message"),
        [
            ([], {}, "nothing to encode: pass --suite, --tabletop or --instruction"),
            (["--instruction", " "], {}, "instructions must not be empty"),
            (["--suite", "libero_easy"], {}, "unknown LIBERO suite 'libero_easy'; did you mean "),
            (["--tabletop"], {"encoder": "absent.pth"}, "there is no text encoder"),
            (["--tabletop"], {"tokenizer": "absent"}, "there is no "),
            (["--tabletop"], {"length": 12}, "tokens, a context holds length=12"),
            (["--tabletop", "--device", "tpu9"], {}, "device must be 'auto' or a torch device, got 'tpu9'"),
        ],
    )
    def test_message(self, files, build, what, options, message):
        code, _ = build(*what, **options)
        assert isinstance(code, str)
        line, _ = code.splitlines()  # the second tells how to see more
        assert line.startswith("wamrl-context: ")
        assert message in line
        assert not (files / "c.safetensors").exists()

    def test_out_is_a_directory(self, files, build):
        (files / "c.safetensors").mkdir()
        code, _ = build("--tabletop")
        assert str(code).startswith(f"wamrl-context: {files / 'c.safetensors'} is a directory")

    def test_show_nothing(self, files, wamrl_context):
        code, _ = wamrl_context("show", files / "absent")
        assert str(code).startswith(f"wamrl-context: there is no context cache {files / 'absent'}; make it with")

    def test_unknown_dtype_is_usage(self, build):
        assert build("--tabletop", dtype="float16")[0] == 2


class TestShow:
    def test_lists_what_is_there(self, files, build, wamrl_context):
        instruction = "put the [red] block on the plate"  # no markup
        build("--instruction", instruction, "point")
        code, printed = wamrl_context("show", files / "c.safetensors")
        assert code == 0
        cache = read_context_cache(files / "c.safetensors")
        with safe_open(files / "c.safetensors", framework="pt") as file:
            metadata = file.metadata()
        rows = [line.split("│")[1:4] for line in printed.splitlines() if line.count("│") == 4]
        words = len(text.TEMPLATE.split()) - 1
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["0", str(words + 7 + 1), instruction],
            ["1", str(words + 1 + 1), "point"],
        ]
        for fact in (
            f"2 of {LENGTH} x 32, float32",
            text.TEMPLATE,
            cache.encoder["encoder.pth"],
            *cache.tokenizer.values(),
            metadata["contexts_sha256"],
            torch.__version__,
        ):
            assert fact in printed

    def test_hashes_are_whole_in_a_narrow_terminal(self, files, build, wamrl_context, monkeypatch):
        build("--instruction", "point")
        monkeypatch.setenv("COLUMNS", "80")
        assert "…" not in wamrl_context("show", files / "c.safetensors")[1]

    def test_damaged(self, files, build, wamrl_context):
        build("--instruction", "point")
        cache = read_context_cache(files / "c.safetensors")
        write_context_cache(cache, files / "d.safetensors")
        (files / "d.safetensors").write_bytes((files / "d.safetensors").read_bytes()[:-1] + b"\x01")
        code, _ = wamrl_context("show", files / "d.safetensors")
        assert "are damaged: their sha256 is" in str(code)
