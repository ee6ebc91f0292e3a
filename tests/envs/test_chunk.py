"""The contract of ChunkEnv, shown through TableTopEnv."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.envs._chunk import chunks, make_env, request, still
from wamrl_torchrl import schema
from wamrl_torchrl.envs import tabletop_world as world
from wamrl_torchrl.envs.tabletop import TableTopEnv
from wamrl_torchrl.envs.tabletop_render import render

SMALL = (32, 64)
#: What an environment and a policy without a chain can fill of a record.
ENV_PART = (schema.IMAGE, *schema.EPISODE_KEYS, schema.CHUNK_INDEX, schema.ACTION)
ENV_PART = (*ENV_PART, *(("next", key) for key in (*schema.OUTCOME_KEYS, "reward", schema.REWARD_TASK, "done")))
OBSERVED = (schema.IMAGE, schema.STATE, *schema.EPISODE_KEYS, schema.CHUNK_INDEX)


class TestSpecs:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"replan_steps": 32},
            {"replan_steps": 1, "frame_offsets": (1,)},
            {"frame_offsets": "every"},
            {"frame_offsets": ()},
            {"images": False},
        ],
    )
    def test_bare(self, options):
        check_env_specs(make_env(3, **options))

    def test_transformed(self):
        check_env_specs(TransformedEnv(make_env(3), Compose(StepCounter(), RewardSum())))

    def test_serial(self):
        env = SerialEnv(2, partial(make_env, 3))
        check_env_specs(env)
        assert env.rollout(3, break_when_any_done=False).batch_size == (2, 3, 3)

    @pytest.mark.slow
    def test_parallel(self):
        env = ParallelEnv(2, partial(make_env, 3))
        try:
            check_env_specs(env)
        finally:
            env.close()

    def test_every_frame(self):
        env = make_env(2, replan_steps=3, frame_offsets="every")
        assert env.frame_offsets == (1, 2, 3)
        assert env.observation_spec[schema.FUTURE_FRAMES].shape == (2, 3, 3, *SMALL)

    def test_no_images(self):
        """Nothing else changes, parked slots included."""
        rows = [[1, 2, 3, 4, 5], [0, 0, 0, 0, schema.PARKED]]
        action = chunks(2)
        with_images, without = (make_env(2, images=images) for images in (True, False))
        steps = [env.step(env.reset(request(rows)).set("action", action))["next"] for env in (with_images, without)]
        pictures = [schema.IMAGE, schema.FUTURE_FRAMES, schema.FUTURE_MASK]
        rest = steps[0].exclude(*pictures)
        assert set(steps[1].keys(True, True)) == set(rest.keys(True, True))
        assert (rest == steps[1]).all()

    def test_default_picture(self):
        env = TableTopEnv(2)
        assert env.observation_spec["observation", "image"].shape == (2, 3, 64, 128)
        assert env.observation_spec[schema.SIM_STATES].shape == (2, 9, world.STATE_DIM)


class TestReset:
    def test_honours_the_ids_asked_for(self):
        rows = [[5, 49, 7, 3, 11], [0, 0, 0, 3, 12], [2, 1234, -9, 4, 13]]
        td = make_env(3).reset(request(rows))
        found = torch.cat([td[key] for key in schema.EPISODE_KEYS], -1)
        assert found.tolist() == rows
        states = world.initial_states(*torch.tensor(rows)[:, :3].unbind(-1))
        assert torch.equal(td["observation", "image"], render(states, SMALL))
        assert torch.equal(td["observation", "state"], world.proprioception(states))
        assert not td["done"].any()
        assert (td[schema.CHUNK_INDEX] == 0).all()

    def test_through_a_transformed_environment(self):
        rows = [[1, 2, 3, 4, 5], [3, 2, 1, 4, 6]]
        td = TransformedEnv(make_env(2), StepCounter()).reset(request(rows))
        assert torch.cat([td[key] for key in schema.EPISODE_KEYS], -1).tolist() == rows

    def test_through_a_serial_environment(self):
        rows = [[1, 2, 3, 4, 5], [3, 2, 1, 4, 6], [0, 9, 8, 7, 7], [5, 5, 5, 5, 8]]
        td = SerialEnv(2, partial(make_env, 2)).reset(request(rows).reshape(2, 2))
        found = torch.cat([td[key] for key in schema.EPISODE_KEYS], -1)
        assert found.reshape(4, 5).tolist() == rows

    def test_some_ids_may_be_left_to_the_environment(self):
        env = make_env(64, task_ids=[2])
        td = env.reset(TensorDict({schema.INIT_STATE_ID: torch.full((64, 1), 47)}, batch_size=[64]))
        assert (td[schema.INIT_STATE_ID] == 47).all()
        assert (td[schema.TASK_ID] == 2).all()
        assert len(td[schema.EPISODE_ID].unique()) == 64

    def test_the_seed_decides_what_is_dealt(self):
        def dealt(seed: int) -> torch.Tensor:
            env = make_env(32)
            env.set_seed(seed)
            return torch.cat([env.reset()[key] for key in (schema.TASK_ID, schema.INIT_STATE_ID, schema.ENV_SEED)], -1)

        assert torch.equal(dealt(3), dealt(3))
        assert not torch.equal(dealt(3), dealt(4))

    def test_an_echo_of_the_ids_is_dealt_anew(self):
        env = make_env(4)
        first = env.reset()
        again = env.reset(first.select(*schema.EPISODE_KEYS))
        assert not (first[schema.EPISODE_ID] == again[schema.EPISODE_ID]).any()
        assert not (first[schema.ENV_SEED] == again[schema.ENV_SEED]).any()

    def test_the_same_start_under_a_new_episode_id_is_a_request(self):
        env = make_env(4)
        first = env.reset()
        wanted = first.select(*schema.EPISODE_KEYS).clone()
        wanted[schema.EPISODE_ID] += 100
        again = env.reset(wanted.clone())
        assert (again.select(*schema.EPISODE_KEYS) == wanted).all()
        assert torch.equal(again["observation", "image"], first["observation", "image"])

    def test_partial_reset_leaves_the_other_slots_alone(self):
        env = make_env(4)
        td = env.reset()
        before = env.step(td.set("action", chunks(4)))["next"]
        mask = torch.tensor([[True], [False], [True], [False]])
        after = env.reset(before.clone().set("_reset", mask))
        kept = ~mask.flatten()
        for key in before.keys(True, True):
            assert torch.equal(after[key][kept], before[key][kept]), key
        assert not (after[schema.EPISODE_ID] == before[schema.EPISODE_ID])[mask].any()
        assert after[schema.CHUNK_INDEX].flatten().tolist() == [0, 1, 0, 1]
        assert (after[schema.SIM_STATES][mask.flatten()] == 0).all()
        # And they go on from where they were.
        action = chunks(4)
        later = env.step(after.clone().set("action", action))["next"]
        assert torch.equal(later[schema.SIM_STATES][kept, 0], before[schema.SIM_STATES][kept, -1])

    def test_observations_are_not_overwritten_by_later_steps(self):
        env = make_env(2)
        first = env.reset()
        copy = first.clone()
        second = env.step(first.clone().set("action", chunks(2)))["next"]
        second_copy = second.clone()
        env.step(second.clone().set("action", chunks(2)))
        env.reset()
        assert (first == copy).all()
        assert (second == second_copy).all()


class TestStep:
    @pytest.fixture
    def demo(self) -> TensorDict:
        ids = torch.tensor([[2, 17, 5, 0, 0]])
        return TableTopEnv(1, image_size=SMALL).demonstrate(ids, noise=0.15, frame_stride=1)[0]

    @pytest.mark.parametrize("replan_steps", [1, 3, 8, 32])
    def test_success_is_exact_at_every_place_in_a_chunk(self, demo, replan_steps):
        """Slot k replays the expert so that success falls on action k + 1 of a chunk; what follows would undo it."""
        offsets = tuple(o for o in (1, 3, 8, 20) if o <= replan_steps)
        env = make_env(replan_steps, replan_steps=replan_steps, frame_offsets=offsets, max_episode_steps=200)
        length = len(demo["executed_actions"])
        waits = (torch.arange(replan_steps) + 1 - length) % replan_steps
        rounds = int((waits + length).max()) // replan_steps + 1
        script = chunks(replan_steps * rounds * replan_steps // schema.CHUNK + replan_steps).view(-1, schema.ACTION_DIM)
        script = script[: replan_steps * rounds * replan_steps].view(replan_steps, -1, schema.ACTION_DIM).clone()
        for slot, wait in enumerate(waits.tolist()):
            script[slot, :wait] = still(1)[0, :1]
            script[slot, wait : wait + length] = demo["executed_actions"]
        td = env.reset(request([[2, 17, 5, 0, slot] for slot in range(replan_steps)]))
        finished = torch.zeros(replan_steps, dtype=torch.bool)
        for index in range(rounds):
            action = chunks(replan_steps)
            action[:, :replan_steps] = script[:, index * replan_steps : (index + 1) * replan_steps]
            td = env.step(td.set("action", action))["next"]
            ends = (waits + length - 1) // replan_steps == index
            live = ~finished
            assert torch.equal(td[schema.SUCCESS][live, 0], ends[live])
            assert torch.equal(td["terminated"][live, 0], ends[live])
            assert torch.equal(td["done"][live, 0], ends[live])
            assert not td["truncated"][live].any()
            assert torch.equal(td["reward"][live, 0], ends[live].float())
            assert torch.equal(td[schema.REWARD_TASK], td["reward"])
            executed = torch.where(ends, torch.arange(replan_steps) + 1, torch.tensor(replan_steps))
            want_mask = torch.arange(schema.CHUNK) < executed[:, None]
            assert torch.equal(td[schema.EXECUTED_MASK][live], want_mask[live])
            reached = executed[:, None] >= torch.tensor(offsets)
            assert torch.equal(td[schema.FUTURE_MASK][live], reached[live])
            assert (td[schema.FUTURE_FRAMES][live][~reached[live]] == 0).all()
            for slot in ends.nonzero().flatten().tolist():
                count = slot + 1
                assert torch.equal(td["observation", "image"][slot], demo["frames"][-1])
                assert (td[schema.SIM_STATES][slot, count:] == demo["sim_states"][-1]).all()
                for place, offset in enumerate(offsets):
                    step = length - count + offset
                    if offset <= count and step >= 0:
                        assert torch.equal(td[schema.FUTURE_FRAMES][slot, place], demo["frames"][step])
            finished |= ends
        assert finished.all()

    def test_stored_states_render_to_what_was_seen(self):
        env = make_env(6)
        td = env.reset()
        for _ in range(3):
            before = td["observation", "image"]
            td = env.step(td.set("action", chunks(6)))["next"]
            states = td[schema.SIM_STATES]
            assert torch.equal(render(states[:, 0], SMALL), before)
            assert torch.equal(render(states[:, -1], SMALL), td["observation", "image"])
            for place, offset in enumerate(env.frame_offsets):
                assert torch.equal(render(states[:, offset], SMALL), td[schema.FUTURE_FRAMES][:, place])
            assert torch.equal(world.proprioception(states[:, -1]), td["observation", "state"])

    @pytest.mark.parametrize(("horizon", "want"), [(16, [8, 8]), (20, [8, 8, 4]), (3, [3]), (8, [8])])
    def test_truncates_at_the_horizon(self, horizon, want):
        env = make_env(2, max_episode_steps=horizon)
        td = env.reset()
        for index, executed in enumerate(want):
            td = env.step(td.set("action", still(2)))["next"]
            last = index == len(want) - 1
            assert td[schema.EXECUTED_MASK].sum(-1).tolist() == [executed] * 2
            assert td[schema.FUTURE_MASK].tolist() == [[executed >= 4, executed >= 8]] * 2
            assert td["truncated"].flatten().tolist() == [last] * 2
            assert td["done"].flatten().tolist() == [last] * 2
            assert not td["terminated"].any()
            assert td[schema.CHUNK_INDEX].flatten().tolist() == [index + 1] * 2

    def test_every_task_has_its_horizon(self):
        env = make_env(4, max_episode_steps=(3, 8, 20))
        td = env.reset(request([[0, 0, 0, 0, 0], [1, 0, 0, 1, 1], [2, 0, 0, 2, 2], [9, 0, 0, 0, schema.PARKED]]))
        td = env.step(td.set("action", still(4)))["next"]
        assert td[schema.EXECUTED_MASK].sum(-1).tolist() == [3, 8, 8, 0]
        assert td["truncated"].flatten().tolist() == [True, True, False, True]

    def test_success_on_the_last_action_of_the_horizon_is_no_truncation(self, demo):
        length = len(demo["executed_actions"])
        env = make_env(1, max_episode_steps=length)
        td = env.reset(request([[2, 17, 5, 0, 0]]))
        for start in range(0, length, 8):
            action = still(1)
            part = demo["executed_actions"][start : start + 8]
            action[0, : len(part)] = part
            td = env.step(td.set("action", action))["next"]
        assert td["terminated"].item()
        assert not td["truncated"].item()
        assert td["reward"].item() == 1

    def test_actions_beyond_the_replanning_do_not_matter(self):
        one, other = make_env(3), make_env(3)
        action = chunks(3)
        changed = action.clone()
        changed[:, 8:] = -changed[:, 8:]
        first = one.step(one.reset().set("action", action))["next"]
        assert (first == other.step(other.reset().set("action", changed))["next"]).all()

    @pytest.mark.parametrize("shape", [(2, 31, 7), (2, 32, 6), (2, 224), (2, 8, 7)])
    def test_a_chunk_of_the_wrong_shape_is_refused(self, shape):
        env = make_env(2)
        with pytest.raises(ValueError, match=r"'action' must have shape \(2, 32, 7\), found"):
            env.step(env.reset().set("action", torch.zeros(shape)))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_chunk_that_is_not_finite_is_refused_with_its_slot(self, value):
        env = make_env(3)
        td = env.reset(request([[0, 1, 2, 3, 4], [5, 1, 2, 3, 7], [0, 1, 2, 3, 6]]))
        action = still(3)
        action[1, 20, 3] = value
        with pytest.raises(ValueError, match=r"slot 1 .*'episode_id': 7"):
            env.step(td.set("action", action))


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"num_envs": 0}, "num_envs"),
            ({"replan_steps": 33}, "replan_steps"),
            ({"replan_steps": 0}, "replan_steps"),
            ({"max_episode_steps": 0}, "max_episode_steps"),
            ({"max_episode_steps": [8, 0, 8]}, "max_episode_steps"),
            ({"frame_offsets": (4, 9)}, "frame_offsets"),
            ({"frame_offsets": (8, 4)}, "frame_offsets"),
            ({"frame_offsets": (4, 4)}, "frame_offsets"),
            ({"frame_offsets": (0, 4)}, "frame_offsets"),
        ],
    )
    def test_bad_options_are_named(self, options, name):
        with pytest.raises(ValueError, match=name):
            make_env(**{"num_envs": 2, **options})


class TestParked:
    ROWS = ([0, 1, 2, 3, 4], [-1, -1, -1, -1, schema.PARKED], [3, 2, 1, 0, 5], [1, 1, 1, 1, schema.PARKED])

    def test_nothing_happens_in_a_parked_slot(self):
        env = make_env(4)
        td = env.reset(request(list(self.ROWS)))
        assert env.parked.tolist() == [False, True, False, True]
        image = td["observation", "image"]
        for index in range(2):
            td = env.step(td.set("action", chunks(4)))["next"]
            parked = env.parked
            assert torch.equal(td["truncated"][:, 0], parked)
            assert torch.equal(td["done"][:, 0], parked)
            assert not td[schema.EXECUTED_MASK][parked].any()
            assert td[schema.EXECUTED_MASK][~parked].sum(-1).tolist() == [8, 8]
            assert not td[schema.FUTURE_MASK][parked].any()
            assert (td[schema.FUTURE_FRAMES][parked] == 0).all()
            assert (td[schema.SIM_STATES][parked] == 0).all()
            assert (td["reward"] == 0).all()
            assert torch.equal(td["observation", "image"][parked], image[parked])
            assert td[schema.CHUNK_INDEX].flatten().tolist() == [index + 1, 0, index + 1, 0]

    def test_running_slots_do_not_notice(self):
        action = chunks(4)
        some, every = make_env(4), make_env(4)
        rows = [list(row) for row in self.ROWS]
        all_busy = [rows[0], [0, 0, 0, 0, 8], rows[2], [1, 0, 0, 0, 9]]
        one = some.step(some.reset(request(rows)).set("action", action))["next"]
        other = every.step(every.reset(request(all_busy)).set("action", action))["next"]
        for key in one.keys(True, True):
            assert torch.equal(one[key][[0, 2]], other[key][[0, 2]]), key

    def test_asking_again_to_park_keeps_it_parked(self):
        env, rows = make_env(2), [[0, 1, 2, 3, schema.PARKED], [-1] * 5]
        for _ in range(3):
            td = env.reset(request(rows))
            assert env.parked.all()
            assert torch.cat([td[key] for key in schema.EPISODE_KEYS], -1).tolist() == rows
            env.step(td.set("action", chunks(2)))
        td = env.reset(request([[0, 1, 2, 3, 4], [-1] * 5]))
        assert env.parked.tolist() == [False, True]
        assert env.step(td.set("action", still(2)))["next", schema.EXECUTED_MASK].sum(-1).tolist() == [8, 0]

    def test_a_reset_without_ids_deals_it_an_episode(self):
        env = make_env(2)
        env.reset(request([[-1] * 5] * 2))
        env.reset()
        assert not env.parked.any()

    def test_all_slots_may_be_parked(self):
        env = make_env(2)
        td = env.reset(request([[-1] * 5] * 2))
        out = env.step(td.set("action", chunks(2)))["next"]
        assert out["truncated"].all()
        assert not out[schema.EXECUTED_MASK].any()
