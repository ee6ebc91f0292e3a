from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wamrl_torchrl.tensor_files import check_tensors, named_tensors, read_pickle, read_tensors

#: A file of each format; "old" is that of torch before 1.6.
FILES = ("a.safetensors", "a.pth", "a.pt", "a.bin", "old.pt")

EMPTY_ZIP = b"PK\x05\x06" + bytes(18)


def write(content, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization="old" not in path.name)
    return path


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(300, generator=generator).bfloat16()
    return {"block.weight": torch.randn(20, 30, generator=generator), "half": half, "count": torch.tensor(3)}


class RunsCode:
    def __reduce__(self):
        return print, ("code was run",)


class TestReading:
    @pytest.mark.parametrize("name", FILES)
    def test_tensors_come_back(self, tmp_path, name):
        found = read_tensors(str(write(make_tensors(), tmp_path / name)))
        assert found.keys() == make_tensors().keys()
        for key, value in make_tensors().items():
            assert found[key].dtype == value.dtype
            assert found[key].device.type == "cpu"
            assert torch.equal(found[key], value)

    @pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
    def test_files_are_mapped(self, tmp_path, name):
        """What is written into the file shows in a tensor that was not looked at before."""
        path = write(make_tensors(), tmp_path / name)
        found = read_tensors(path)
        content = path.read_bytes()
        data = make_tensors()["block.weight"].numpy().tobytes()
        with path.open("r+b") as file:
            file.seek(content.index(data))
            file.write(bytes(len(data)))
        assert not found["block.weight"].any()

    def test_other_content_of_a_pickle(self, tmp_path):
        content = {"state": make_tensors(), "step": 7, "names": ["a", None], "scale": 0.5}
        found = read_pickle(write(content, tmp_path / "a.pt"))
        assert torch.equal(found["state"]["half"], content["state"]["half"])
        assert {**found, "state": None} == {**content, "state": None}

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("damage", [0, 1, 20, 0.2, 0.5, 0.9, -1, b"<html>not found</html>", EMPTY_ZIP])
    def test_a_damaged_file_and_one_of_another_kind(self, tmp_path, name, damage):
        """``damage``: how much is kept, or other content."""
        path = write(make_tensors(), tmp_path / name)
        content = path.read_bytes()
        kept = int(damage * len(content)) if isinstance(damage, float) else damage
        path.write_bytes(kept if isinstance(kept, bytes) else content[:kept])
        with pytest.raises(ValueError, match=rf"cannot read {path}: it is damaged.*\(.+\)"):
            read_tensors(path)

    @pytest.mark.parametrize("name", ["a.pt", "old.pt", "plain.pt"])
    def test_code_is_not_run(self, tmp_path, capsys, name):
        content = {"weight": torch.zeros(1), "step": RunsCode()}
        path = write(content, tmp_path / name)
        if name == "plain.pt":
            path.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(ValueError, match=rf"cannot read {path}: .*would run code \(Unsupported global: GLOBAL "):
            read_pickle(path)
        assert not capsys.readouterr().out

    @pytest.mark.parametrize("name", FILES)
    def test_no_file(self, tmp_path, name):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / name)):
            read_tensors(tmp_path / name)

    def test_another_suffix(self, tmp_path):
        (tmp_path / "a.gguf").write_bytes(b"")
        with pytest.raises(ValueError, match=r"a\.gguf: its suffix is neither \.safetensors nor one of \.pth, \.pt"):
            read_tensors(tmp_path / "a.gguf")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([torch.zeros(1)], "found list"),
            ({"a": torch.zeros(1), "state_dict": {"a": torch.zeros(1)}}, "found dict under 'state_dict'"),
            ({"step": 3}, "found int under 'step'"),
            ({0: torch.zeros(1)}, "found Tensor under 0"),
        ],
    )
    def test_no_flat_dict_of_tensors(self, tmp_path, content, message):
        path = write(content, tmp_path / "a.pt")
        with pytest.raises(ValueError, match=f"{path} must hold tensors by name, {message}"):
            read_tensors(path)
        with pytest.raises(ValueError, match=f"the field must hold tensors by name, {message}"):
            named_tensors(content, "the field")


def misfits(expected, found, **options) -> str:
    with pytest.raises(ValueError, match="does not fit") as caught:
        check_tensors(expected, found, "the file", **options)
    return str(caught.value)


class TestChecking:
    @pytest.mark.parametrize("on", ["cpu", "meta"])
    def test_what_fits(self, on):
        expected = {name: value.to(on) for name, value in make_tensors().items()}
        found = make_tensors()
        check_tensors(expected, found, "here")
        check_tensors(expected, {**found, "half": found["half"].double(), "count": torch.tensor(True)}, "here")
        check_tensors({"half": [300]}, {"half": found["half"]}, "here")

    def test_the_whole_message(self):
        found = {**make_tensors(), "block.weight": torch.zeros(30, 20), "c": torch.zeros(1)}
        assert misfits({**make_tensors(), "b": torch.zeros(())}, found, what="the part") == (
            "the file does not fit the part: b is missing; c is unexpected; "
            "block.weight has shape (30, 20), expected (20, 30)"
        )

    @pytest.mark.parametrize("expected", [torch.zeros(2, dtype=torch.bfloat16), (2,)])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
    def test_no_weights_from_integers_or_quantised(self, expected, dtype):
        message = misfits({"a": expected}, {"a": torch.zeros(2).to(dtype)})
        assert message == f"the file does not fit the model: a has dtype {dtype}, expected unquantised floating point"

    def test_no_counts_from_floating_point(self):
        message = misfits({"count": torch.tensor(1)}, {"count": torch.tensor(1.0)})
        assert message.endswith(": count has dtype torch.float32, expected torch.int64")

    def test_names_of_the_file(self):
        tied = torch.zeros(2)
        names = {"a": "x", "tied": "x", "b": "y"}
        expected = {"a": tied, "tied": tied, "b": (3,), "c": (1,)}
        check_tensors(expected, {"x": tied, "y": torch.ones(3), "c": tied[:1]}, "here", names=names)
        message = misfits(expected, {"y": tied, "a": tied}, names=names)
        assert message.endswith(": x is missing; c is missing; a is unexpected; y has shape (2,), expected (3,)")

    @pytest.mark.parametrize(("count", "end"), [(5, "name4 is missing"), (6, "name4 is missing and 1 more")])
    def test_five_are_named(self, count, end):
        message = misfits({f"name{i}": (1,) for i in range(count)}, {})
        assert message.endswith(f"name3 is missing; {end}")
