"""Which frames LiberoEnv renders, and frames rendered afterwards."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from tests.envs._libero import act, random_actions, request
from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_suites import load_suite

pytestmark = pytest.mark.libero
#: Put the bowl on the stove.
TASK, SEED = 1, 11
#: Columns of libero_goal's rows: knob of the stove in qpos and qvel, and alpha of its burner in the picture.
KNOB, KNOB_SPEED, BURNER, WIDTH = 1 + 40, 1 + 41 + 36, 79 + 11 + 41, 2 * 79 + 11
PLAIN, TURNING = (TASK, 3, SEED), (TASK, 50, SEED + 1)
OPTIONS = {"task_ids": [TASK], "replan_steps": 3, "max_episode_steps": 6, "settle_steps": 1}


@pytest.fixture(scope="module")
def start_states():
    """The stove's knob is being turned, a moment before the burner goes on."""
    state = torch.from_numpy(load_suite("libero_goal").init_states[TASK][:1].copy())
    state[0, KNOB], state[0, KNOB_SPEED] = 0.47, 5.0
    return {TASK: state}


@pytest.fixture(scope="module")
def env(start_states):
    env = LiberoEnv("libero_goal", 2, frame_offsets="every", start_states=start_states, **OPTIONS)
    yield env
    env.close()


@pytest.fixture(scope="module")
def rollout(env):
    """Two chunks of three actions: an init state in slot 0, the start state in slot 1."""
    observation, actions = env.reset(request(PLAIN, TURNING)), random_actions(6)
    records = []
    for part in actions.split(3):
        following = act(env, observation, part, part)
        records.append(observation.select("observation").set("action", part.expand(2, 3, 7)).set("next", following))
        observation = following
    return torch.stack(records, 1)  # [2 slots, 2 chunks]


def live(rollout: TensorDict, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames and simulator states of all steps of a slot's episode."""
    frames, states = rollout["next", schema.FUTURE_FRAMES][slot], rollout["next", schema.SIM_STATES][slot]
    return (
        torch.cat((rollout[schema.IMAGE][slot, :1], frames.flatten(0, 1))),
        torch.cat((states[0], states[1, 1:])),
    )


def stored(task: int, env_seed: int, sim_states: torch.Tensor) -> TensorDict:
    ids = {schema.TASK_ID: torch.tensor([task]), schema.ENV_SEED: torch.tensor([env_seed])}
    return TensorDict({**ids, schema.SIM_STATES: sim_states}, batch_size=[])


class TestRender:
    def test_bit_equal_to_live_frames(self, env, rollout):
        """Every step, the first included, of an episode from an init state and of one from a start state."""
        env.reset(request((TASK, 0, 5), (TASK, 1, 6)))  # other fixtures than those that are to be drawn
        (frames, states), (turning_frames, turning_states) = live(rollout, 0), live(rollout, 1)
        found = env.render([stored(TASK, SEED, states), stored(TASK, SEED + 1, turning_states)])
        assert torch.equal(found[0], frames)
        assert torch.equal(found[1], turning_frames)
        assert len({frame.sum().item() for frame in torch.cat(found)}) == len(states) + len(turning_states)
        assert env.parked.all()

    def test_the_burner_was_drawn_as_it_was(self, rollout):
        """It goes on behind the control step in which the knob passes 0.5, so the next picture is the first with it."""
        knob, burner = live(rollout, 1)[1][:, [KNOB, BURNER]].unbind(-1)
        assert (knob > 0.5).tolist() == [False] + [True] * 6
        assert (burner > 0).tolist() == [False, False] + [True] * 5
        assert (live(rollout, 0)[1][:, BURNER] < 0).all()

    def test_picture_is_behind_the_state(self, rollout):
        """By a physics step or two; but at the start, which is placed and not stepped to, they agree."""
        states = live(rollout, 1)[1]
        gap = (states[:, 1 : 1 + 41] - states[:, 90 : 90 + 41]).abs().amax(-1)
        assert gap[0] == 0
        assert (gap[1:] > 0).all()
        assert (states[:, BURNER + 1 :] == 0).all()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"sim_states": torch.zeros(2, 90, dtype=torch.float64)},
                r"episode 0 must be float64 \[T,169\].*\[2, 90\]",
            ),
            ({"sim_states": torch.zeros(2, WIDTH)}, r"must be float64 \[T,169\].*found torch.float32"),
            ({"sim_states": torch.zeros(0, WIDTH, dtype=torch.float64)}, r"found torch.float64 \[0, 169\]"),
            ({"task_id": torch.tensor([10])}, "task_id 10 is out of range"),
            ({"env_seed": torch.tensor([-1])}, "env_seed -1 is out of range"),
        ],
    )
    def test_refuses(self, env, changes, message):
        episode = stored(TASK, SEED, torch.zeros(2, WIDTH, dtype=torch.float64)).update(changes)
        with pytest.raises(ValueError, match=message):
            env.render([episode])

    def test_names_what_is_missing(self, env):
        episode = stored(TASK, SEED, torch.zeros(2, WIDTH, dtype=torch.float64))
        with pytest.raises(KeyError, match=r"episode 1 lacks \['env_seed'\]"):
            env.render([episode, episode.exclude("env_seed")])


class TestSchedule:
    def test_every_step(self, env, rollout):
        assert env.frame_offsets == (1, 2, 3)
        assert env.observation_spec[schema.FUTURE_FRAMES].shape == (2, 3, 3, 224, 448)
        assert rollout["next", schema.FUTURE_MASK].all()
        assert torch.equal(rollout["next", schema.IMAGE], rollout["next", schema.FUTURE_FRAMES][:, :, -1])

    def test_no_images(self, rollout, start_states):
        """The same states to the bit, and nothing to see."""
        env = LiberoEnv("libero_goal", 1, images=False, start_states=start_states, **OPTIONS)
        try:
            check_env_specs(env)
            observation = env.reset(request(TURNING))
            assert schema.IMAGE not in observation.keys(True)
            for chunk in range(2):
                observation = act(env, observation, rollout["action"][1, chunk])
                for key in (schema.SIM_STATES, schema.STATE, schema.EXECUTED_MASK):
                    assert torch.equal(observation[0][key], rollout["next"][1, chunk][key])
                assert not {schema.FUTURE_FRAMES, schema.FUTURE_MASK} & set(observation.keys())
            with pytest.raises(ValueError, match="images=False: nothing can be rendered"):
                env.render([stored(TASK, SEED, observation[schema.SIM_STATES][0])])
        finally:
            env.close()
