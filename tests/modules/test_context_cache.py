from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.context_cache import (
    ContextCache,
    file_hashes,
    read_context_cache,
    write_context_cache,
)

INSTRUCTIONS = ("open the drawer", "put the bowl on the plate", 'pick up the "red" cup, s\'il vous plaît')


def make_cache(dtype: torch.dtype = torch.bfloat16) -> ContextCache:
    contexts = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    contexts[:, 5:] = 0
    return ContextCache(
        contexts=contexts,
        instructions=INSTRUCTIONS,
        template="do {task}",
        encoder={"encoder.pth": "ab" * 32},
        tokenizer={"tokenizer.json": "cd" * 32, "tokenizer_config.json": "ef" * 32},
        versions={"torch": ["2.13.0", "2.14.0"]},
    )


@pytest.fixture
def path(tmp_path):
    return write_context_cache(make_cache(), tmp_path / "contexts.safetensors")


def change(path, *, tensors=None, **fields: str | None) -> None:
    """Rewrite a file with other tensors or metadata; None takes a field out."""
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **fields}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    save_file(load_file(path) if tensors is None else tensors, path, metadata=metadata)


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_everything_comes_back(self, tmp_path, dtype):
        cache = make_cache(dtype)
        again = read_context_cache(write_context_cache(cache, tmp_path / "new" / "contexts.safetensors"))
        assert again.contexts.dtype == dtype
        assert torch.equal(again.contexts, cache.contexts)
        assert again.length == 8
        for name in ("instructions", "template", "encoder", "tokenizer", "versions"):
            assert getattr(again, name) == getattr(cache, name), name

    def test_metadata_are_readable_without_this_package(self, path):
        with safe_open(path, framework="pt") as file:
            metadata, contexts = file.metadata(), file.get_tensor("contexts")
        assert json.loads(metadata["instructions"]) == list(INSTRUCTIONS)
        assert metadata["length"] == "8"
        assert metadata["template"] == "do {task}"
        content = contexts.view(torch.int16).numpy().tobytes()
        assert metadata["contexts_sha256"] == hashlib.sha256(content).hexdigest()

    def test_non_contiguous_and_tracked_contexts(self, tmp_path):
        contexts = torch.randn(16, 8, 3).permute(2, 1, 0).requires_grad_()
        path = write_context_cache(replace(make_cache(), contexts=contexts), tmp_path / "c")
        assert torch.equal(read_context_cache(path).contexts, contexts)

    def test_writing_again_replaces_at_once(self, path, monkeypatch):
        held = read_context_cache(path)
        before = held.contexts.clone()
        write_context_cache(replace(make_cache(), contexts=torch.ones(3, 8, 16)), path)
        assert torch.equal(held.contexts, before), "what was read must not change under the reader"
        assert torch.equal(read_context_cache(path).contexts, torch.ones(3, 8, 16))
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


class TestContent:
    def test_missing_and_select(self):
        cache = make_cache()
        assert cache.missing(["new", INSTRUCTIONS[1], "new", "old"]) == ["new", "old"]
        rows = [2, 0, 2]
        assert torch.equal(cache.select([INSTRUCTIONS[row] for row in rows]), cache.contexts[rows])
        with pytest.raises(KeyError, match="no context for 'new'"):
            cache.select([INSTRUCTIONS[0], "new"])

    @pytest.mark.parametrize("contexts", [torch.zeros(2, 8, 16), torch.zeros(3, 8), torch.zeros(3, 8, 16).int()])
    def test_bad_contexts(self, contexts):
        with pytest.raises(ValueError, match=r"\[N,L,D\] with a row for each of the 3 instructions"):
            replace(make_cache(), contexts=contexts)

    def test_repeated_instruction(self):
        with pytest.raises(ValueError, match=r"found twice: \['open the drawer'\]"):
            replace(make_cache(), instructions=("open the drawer", "a", "open the drawer"))

    def test_file_hashes(self, tmp_path):
        (tmp_path / "a").write_bytes(b"abc")
        (tmp_path / "b").write_bytes(bytes(range(256)) * 40000)  # several parts
        hashes = file_hashes([tmp_path / "b", tmp_path / "a"])
        assert hashes["a"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert hashes["b"] == hashlib.sha256((tmp_path / "b").read_bytes()).hexdigest()


class TestBadFiles:
    def test_none(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no context cache .*absent; make it with: wamrl-context build"):
            read_context_cache(tmp_path / "absent")

    def test_changed_contexts(self, path):
        contexts = load_file(path)["contexts"]
        contexts[1, 2, 3] += 1
        change(path, tensors={"contexts": contexts})
        with pytest.raises(ValueError, match=rf"contexts in {path} are damaged.*--overwrite"):
            read_context_cache(path)

    def test_one_flipped_bit(self, path):
        content = bytearray(path.read_bytes())
        content[-200] ^= 4
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"contexts in {path} are damaged"):
            read_context_cache(path)

    def test_cut_short(self, path):
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(ValueError, match=f"cannot read the context cache {path}"):
            read_context_cache(path)

    def test_other_safetensors_file(self, path):
        save_file({"contexts": torch.zeros(3, 8, 16)}, path)
        with pytest.raises(ValueError, match=f"{path} is a safetensors file but no context cache"):
            read_context_cache(path)

    def test_other_format(self, path):
        change(path, wamrl_contexts="2")
        with pytest.raises(ValueError, match="format '2', this version reads '1'"):
            read_context_cache(path)

    def test_no_tensor(self, path):
        change(path, tensors={"other": torch.zeros(1)})
        with pytest.raises(ValueError, match=f"cannot read the context cache {path}"):
            read_context_cache(path)

    @pytest.mark.parametrize(
        "fields",
        [{"instructions": "["}, {"template": None}, {"length": "eight"}, {"encoder_sha256": None}, {"versions": "x"}],
    )
    def test_damaged_metadata(self, path, fields):
        change(path, **fields)
        with pytest.raises(ValueError, match=f"metadata of the context cache {path} are damaged"):
            read_context_cache(path)

    @pytest.mark.parametrize("fields", [{"instructions": '["one"]'}, {"length": "9"}])
    def test_metadata_that_contradict_the_tensor(self, path, fields):
        change(path, **fields)
        with pytest.raises(ValueError, match=f"context cache {path} is damaged"):
            read_context_cache(path)


class TestBank:
    def test_rows_in_the_order_of_the_instructions(self, path):
        order = [2, 0, 0, 1]  # some tasks of libero_90 share an instruction
        bank = ContextBank.from_cache(path, [INSTRUCTIONS[row] for row in order])
        assert bank.contexts.dtype == torch.bfloat16
        assert torch.equal(bank.contexts, make_cache().contexts[order])
        assert bank.instructions == [INSTRUCTIONS[row] for row in order]
        assert torch.equal(bank(torch.tensor([3])), make_cache().contexts[1:2])

    def test_dtype_of_the_file_is_kept(self, tmp_path):
        path = write_context_cache(make_cache(torch.float32), tmp_path / "c")
        assert ContextBank.from_cache(str(path), INSTRUCTIONS).contexts.dtype == torch.float32

    def test_unknown_instruction(self, path):
        with pytest.raises(KeyError) as caught:
            ContextBank.from_cache(path, ["close it", INSTRUCTIONS[0], "it's new"])
        message = caught.value.args[0]
        assert message.startswith(f"the context cache {path} has no 'close it', \"it's new\"; add with: wamrl-context")
        assert message.endswith(f"--out {path} --instruction 'close it' 'it'\"'\"'s new'")

    def test_many_unknown_instructions_are_not_all_named(self, path):
        with pytest.raises(KeyError, match=r"'0', '1', '2' and 87 more; add with: .*--instruction 0 1 2 \.\.\."):
            ContextBank.from_cache(path, [str(i) for i in range(90)])

    def test_no_instructions(self, path):
        with pytest.raises(ValueError, match="at least one task"):
            ContextBank.from_cache(path, [])

    def test_no_text_encoder_is_imported(self, path):
        code = (
            "import sys, wamrl_torchrl.modules\n"
            "from wamrl_torchrl.modules.fastwam.context import ContextBank\n"
            f"bank = ContextBank.from_cache({str(path)!r}, {INSTRUCTIONS!r})\n"
            "assert bank.num_tasks == 3\n"
            "names = ('wamrl_torchrl.modules.fastwam.text', 'transformers.models.umt5', 'diffusers')\n"
            "print([name for name in sys.modules if name.startswith(names)])\n"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == "[]"
