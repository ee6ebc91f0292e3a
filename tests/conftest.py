"""Small shared parts: a tiny model, a policy, states and records."""

from __future__ import annotations

import os

# Before torch is imported: on a machine with few cores, threads that wait for each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig

IMAGE_SIZE = (64, 128)
LEFT_OUT = pytest.StashKey[int]()


def make_stats() -> DatasetStats:
    low, high = -torch.ones(7), torch.ones(7)
    low[-1], high[-1] = 0, 1
    return DatasetStats(state_min=-torch.ones(8), state_max=torch.ones(8), action_min=low, action_max=high)


def make_model(seed: int = 0) -> FastWAM:
    torch.manual_seed(seed)
    config = preset("tiny", image_size=IMAGE_SIZE)
    contexts = ContextBank.hashed(["red block", "blue block", "plate"], length=config.context_length, text_dim=32)
    return FastWAM(config, TinyCodec(), contexts)


def make_policy(seed: int = 0, *, executed_rows: int = 8, **sde) -> FlowPolicy:
    options = {"num_steps": 4, "noise_level": 0.5, **sde}
    return FlowPolicy(make_model(seed), make_stats(), sde=FlowSDEConfig(**options), executed_rows=executed_rows)


def make_states(batch: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    ids = {
        schema.TASK_ID: torch.arange(batch)[:, None] % 3,
        schema.INIT_STATE_ID: torch.arange(batch)[:, None],
        schema.ENV_SEED: torch.zeros(batch, 1, dtype=torch.int64),
        schema.GROUP_ID: torch.zeros(batch, 1, dtype=torch.int64),
        schema.EPISODE_ID: torch.arange(batch)[:, None],
        schema.CHUNK_INDEX: torch.zeros(batch, 1, dtype=torch.int64),
    }
    image = torch.randint(0, 256, (batch, 3, *IMAGE_SIZE), generator=generator, dtype=torch.uint8)
    state = torch.rand(batch, 8, generator=generator) * 2 - 1
    observation = {"image": image, "state": state, "proprio": state.clone()}
    return TensorDict({"observation": observation, **ids}, batch_size=[batch])


def make_windows(batch: int = 3) -> TensorDict:
    """Windows of demonstrations, as they are trained on."""
    generator = torch.Generator().manual_seed(5)
    windows = make_states(batch)
    windows["video"] = torch.randint(0, 256, (batch, 9, 3, *IMAGE_SIZE), generator=generator, dtype=torch.uint8)
    windows["video"][:, 0] = windows["observation", "image"]
    windows["image_is_pad"] = torch.zeros(batch, 9, dtype=torch.bool)
    windows["actions"] = torch.rand(batch, 32, 7, generator=generator) * 2 - 1
    windows["action_is_pad"] = torch.zeros(batch, 32, dtype=torch.bool)
    return windows


def randomize_adapters(module: nn.Module, *, std: float = 0.2) -> None:
    """Move adapters away from their start, where one factor is zero and so the gradient of the other."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=std)


def make_record(policy: FlowPolicy, batch: int, seed: int = 0) -> TensorDict:
    """States acted on by ``policy``, with made-up outcomes."""
    generator = torch.Generator().manual_seed(seed + 1)
    record = policy(make_states(batch, seed))
    executed = torch.randint(1, policy.executed_rows + 1, (batch, 1), generator=generator)
    frames = torch.randint(0, 256, (batch, 2, 3, *IMAGE_SIZE), generator=generator, dtype=torch.uint8)
    record.set(("next", schema.EXECUTED_MASK), torch.arange(schema.CHUNK) < executed)
    record.set(("next", schema.FUTURE_FRAMES), frames)
    record.set(("next", schema.FUTURE_MASK), executed >= torch.tensor(schema.FRAME_OFFSETS))
    record.set(("next", schema.SUCCESS), torch.zeros(batch, 1, dtype=torch.bool))
    record.set(("next", "done"), torch.ones(batch, 1, dtype=torch.bool))
    return record.set(schema.ADVANTAGE, torch.randn(batch, 1, generator=generator))


@pytest.fixture
def model() -> FastWAM:
    return make_model()


@pytest.fixture
def policy() -> FlowPolicy:
    return make_policy()


@pytest.fixture
def states() -> TensorDict:
    return make_states(6)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of a GPU out where there is none, and count them."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Take the count from a worker of pytest-xdist; each collects all tests."""
    if not error:
        node.config.stash[LEFT_OUT] = node.workeroutput.get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say how many tests need a GPU."""
    if config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{config.stash[LEFT_OUT]} tests marked gpu were left out: torch sees no CUDA device"
        )
