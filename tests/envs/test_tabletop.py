from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.envs._tabletop import above_object, action, close_gripper, episodes_of, request, states_of
from wamrl_torchrl import schema
from wamrl_torchrl.envs import tabletop_world as world
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS, TableTopEnv
from wamrl_torchrl.envs.tabletop_render import BLOCK, FLOOR, GOAL_COLOURS, OBJECT_COLOURS, render

TASKS = len(TABLETOP_INSTRUCTIONS)


class TestLayout:
    def test_names_every_pair_of_object_and_goal_once(self):
        assert len(set(TABLETOP_INSTRUCTIONS)) == len(world.OBJECTS) * len(world.GOALS)
        for task_id, text in enumerate(TABLETOP_INSTRUCTIONS):
            assert world.OBJECTS[task_id // len(world.GOALS)] in text
            assert world.GOALS[task_id % len(world.GOALS)] in text

    def test_nothing_stands_on_anything_else(self):
        states = states_of(episodes_of(1200))
        items = states[:, world.OBJECT_POSITIONS].unflatten(-1, (3, 3))[..., :2]
        goals = states[:, world.GOAL_POSITIONS].unflatten(-1, (2, 2))
        points = torch.cat([items, goals], 1)
        distance = torch.cdist(points, points) + torch.eye(points.shape[1])
        assert distance.min() > world.GOAL_RADIUS + world.OBJECT_HALF
        assert points.abs().max() + world.GOAL_RADIUS < 0.23

    def test_no_episode_starts_solved(self):
        episodes = episodes_of(1200)
        assert not world.succeeded(states_of(episodes), episodes[:, 0]).any()

    def test_depends_on_each_id(self):
        base = torch.tensor([[1, 2, 3, 0, 0]])
        for column in range(3):
            other = base.clone()
            other[0, column] += 1
            assert not torch.equal(states_of(base), states_of(other))

    def test_env_seed_moves_the_goals_a_little_and_nothing_else(self):
        episodes = torch.tensor([[1, 2, seed, 0, 0] for seed in range(200)])
        states = states_of(episodes)
        others = states[:, : world.GOAL_POSITIONS.start]
        assert torch.equal(others, others[:1].expand(200, -1))
        spread = states[:, world.GOAL_POSITIONS].amax(0) - states[:, world.GOAL_POSITIONS].amin(0)
        assert (spread > 1.5 * world.SEED_JITTER).all()
        assert (spread <= 2 * world.SEED_JITTER).all()

    def test_hash_is_uniform_and_uncorrelated_between_neighbours(self):
        values = world.uniform_hash(torch.arange(20000)[:, None], torch.arange(3))
        assert values.min() >= 0
        assert values.max() < 1
        assert (values.mean(0) - 0.5).abs().max() < 0.01
        assert (values.var(0) - 1 / 12).abs().max() < 0.005
        centred = values - 0.5
        assert (centred[1:] * centred[:-1]).mean().abs() < 0.002
        assert (centred[:, 0] * centred[:, 1]).mean().abs() < 0.002


class TestPhysics:
    def test_moves_by_the_step_and_stays_in_the_workspace(self):
        state = states_of(episodes_of(1))
        moved = world.advance(state, action(move=(0.5, -1.0, 0.25)))
        want = world.POSITION_STEP * torch.tensor([[0.5, -1.0, 0.25]], dtype=torch.float64)
        assert torch.allclose(moved[:, world.POSITION] - state[:, world.POSITION], want, atol=1e-12)
        for _ in range(40):
            moved = world.advance(moved, action(move=(1.0, 1.0, -1.0)))
        assert moved[0, world.POSITION].tolist() == [0.2, 0.2, 0.01]

    def test_clips_actions_and_ignores_rotation(self):
        state = states_of(episodes_of(1))
        wild = torch.tensor([[5.0, -7.0, 3.0, 1.0, -1.0, 0.5, -9.0]])
        assert torch.equal(world.advance(state, wild), world.advance(state, action(move=(1.0, -1.0, 1.0))))

    def test_leaves_its_input_alone(self):
        state = above_object(0)
        copy = state.clone()
        world.advance(state, action(move=(1.0, 1.0, 1.0), gripper=1.0))
        assert torch.equal(state, copy)

    def test_gripper_ramps_by_the_sign_of_its_action(self):
        state = states_of(episodes_of(1))
        widths = []
        for gripper in (0.1, 1.0, 0.0, 0.3, 1.0, 1.0, 1.0, -0.2, -1.0):
            state = world.advance(state, action(gripper=gripper))
            widths.append(state[0, world.WIDTH].item())
        assert widths == pytest.approx([0.032, 0.024, 0.024, 0.016, 0.008, 0.0, 0.0, 0.008, 0.016])

    @pytest.mark.parametrize("index", range(3))
    def test_grasps_the_object_when_the_fingers_reach_it(self, index):
        state = close_gripper(above_object(index), 2)
        assert state[0, world.HELD] == -1
        state = close_gripper(state, 1)
        assert state[0, world.HELD] == index
        assert state[0, world.WIDTH] == world.OBJECT_HALF
        assert close_gripper(state, 5)[0, world.WIDTH] == world.OBJECT_HALF

    @pytest.mark.parametrize(
        ("axis", "factor"),
        # The floor of the workspace keeps the tip from being too low.
        [(axis, factor) for axis in range(3) for factor in (-1.01, -0.99, 0.99, 1.01) if (axis, factor) != (2, -1.01)],
    )
    def test_grasps_within_the_tolerance_only(self, axis, factor):
        offset = [0.0, 0.0, 0.0]
        offset[axis] = factor * world.GRASP_TOLERANCE[axis]
        state = close_gripper(above_object(1, offset=tuple(offset)))
        assert (state[0, world.HELD] == 1) == (abs(factor) < 1)

    def test_closed_fingers_do_not_grasp_but_reopening_a_little_lets_them(self):
        state = close_gripper(above_object(0, offset=(0.02, 0.0, 0.0)))
        state[0, world.POSITION][0] -= 0.02
        state = close_gripper(state)
        assert state[0, world.HELD] == -1
        while state[0, world.WIDTH] <= world.OBJECT_HALF:
            state = world.advance(state, action())
        assert close_gripper(state, 1)[0, world.HELD] == 0

    def test_held_object_follows_falls_when_released_and_the_others_stay(self):
        state = close_gripper(above_object(2, offset=(0.003, 0.0, 0.0)))
        lifted = state
        for _ in range(5):
            lifted = world.advance(lifted, action(move=(0.3, -0.4, 1.0), gripper=1.0))
        item = lifted[:, world.OBJECT_POSITIONS].unflatten(-1, (3, 3))
        before = state[:, world.OBJECT_POSITIONS].unflatten(-1, (3, 3))
        assert torch.equal(item[:, :2], before[:, :2])
        shift = lifted[:, world.POSITION] - state[:, world.POSITION]
        assert torch.allclose(item[:, 2] - before[:, 2], shift, atol=1e-12)
        heights = []
        for _ in range(4):
            lifted = world.advance(lifted, action())
            heights.append(lifted[0, world.OBJECT_POSITIONS][8].item())
        assert lifted[0, world.HELD] == -1
        assert heights == pytest.approx([0.08, 0.04, 0.02, 0.02])

    def test_held_object_does_not_sink_into_the_table(self):
        state = close_gripper(above_object(0, offset=(0.0, 0.0, 0.009)))
        state = world.advance(state, action(move=(0.0, 0.0, -1.0), gripper=1.0))
        assert state[0, world.OBJECT_POSITIONS][2] == world.OBJECT_HALF

    @pytest.mark.parametrize("task_id", range(TASKS))
    def test_success_needs_the_right_object_on_the_right_goal_and_released(self, task_id):
        task = torch.tensor([task_id])
        for index in range(3):
            for goal in range(2):
                state = states_of(episodes_of(1))
                spot = state[0, world.GOAL_POSITIONS].view(2, 2)[goal]
                state[0, world.OBJECT_POSITIONS].view(3, 3)[index, :2] = spot
                right = (index, goal) == (task_id // 2, task_id % 2)
                assert world.succeeded(state, task).item() == right
                held = state.clone()
                held[0, world.HELD], held[0, world.WIDTH] = index, world.OBJECT_HALF
                assert not world.succeeded(held, task)
                closed = state.clone()
                closed[0, world.WIDTH] = world.OBJECT_HALF
                assert not world.succeeded(closed, task)
                aloft = state.clone()
                aloft[0, world.OBJECT_POSITIONS].view(3, 3)[index, 2] += 0.01
                assert not world.succeeded(aloft, task)

    @pytest.mark.parametrize("factor", [0.99, 1.01])
    def test_success_ends_at_the_place_tolerance(self, factor):
        state = states_of(episodes_of(1))
        spot = state[0, world.GOAL_POSITIONS][:2] + factor * world.GOAL_RADIUS * torch.tensor([0.6, -0.8])
        state[0, world.OBJECT_POSITIONS][:2] = spot
        assert world.succeeded(state, torch.tensor([0])).item() == (factor < 1)

    def test_proprioception_has_the_layout_of_libero(self):
        state = close_gripper(states_of(episodes_of(2)).clone(), 0)
        out = world.proprioception(state)
        assert out.dtype == torch.float32
        assert torch.equal(out[:, :3], state[:, :3].float())
        assert torch.equal(out[:, 3:6], torch.zeros(2, 3))
        assert torch.equal(out[:, 6], -out[:, 7])
        assert torch.equal(out[:, 6], torch.full((2,), world.OPEN_WIDTH))


class TestRender:
    @staticmethod
    def nearest(picture: torch.Tensor, colour: tuple[int, int, int]) -> int:
        """Number of pixels that show ``colour``."""
        gap = (picture.int() - torch.tensor(colour)[:, None, None]).abs().amax(0)
        return int((gap < 12).sum())

    @pytest.mark.parametrize("size", [(64, 128), (32, 64), (96, 64), (224, 448)])
    def test_shows_every_object_and_goal_in_the_agent_view(self, size):
        episodes = episodes_of(24)
        pictures = render(states_of(episodes), size)
        assert pictures.dtype == torch.uint8
        assert pictures.shape == (24, 3, *size)
        agent = pictures[..., : size[1] // 2]
        pixel = 0.52**2 / agent[0, 0].numel()
        for colour in (*OBJECT_COLOURS, *GOAL_COLOURS):
            # A block's upper face is the smallest; the gripper hides some.
            seen = [self.nearest(picture, colour) * pixel for picture in agent]
            assert sum(area > 0.25 * (2 * world.OBJECT_HALF) ** 2 for area in seen) >= 20

    def test_wrist_view_centres_on_what_is_below_the_gripper(self):
        for index, colour in enumerate(OBJECT_COLOURS):
            picture = render(above_object(index, offset=(0.0, 0.0, 0.06)), (64, 128))[0, :, :, 64:]
            gap = (picture.int() - torch.tensor(colour)[:, None, None]).abs().amax(0) < 12
            centre = gap.nonzero().double().mean(0)
            assert torch.allclose(centre, torch.tensor([31.5, 31.5], dtype=torch.float64), atol=0.6)

    def test_wrist_view_grows_as_the_gripper_descends(self):
        areas = [
            self.nearest(render(above_object(0, offset=(0.0, 0.0, height)), (64, 128))[0, :, :, 64:], OBJECT_COLOURS[0])
            for height in (0.16, 0.12, 0.08, 0.04, 0.0)
        ]
        assert areas == sorted(areas)
        assert areas[0] < 0.3 * areas[-1]

    @pytest.mark.parametrize("column", [0, 1, 2, world.WIDTH])
    @pytest.mark.parametrize("view", [slice(0, 64), slice(64, 128)])
    def test_both_views_show_a_move_of_a_few_millimetres(self, column, view):
        state = states_of(episodes_of(12))
        state[:, world.WIDTH] = 0.03
        moved = state.clone()
        moved[:, column] += 0.004
        before, after = (render(s, (64, 128))[..., view].int() for s in (state, moved))
        assert ((before - after).abs().flatten(1).amax(-1) > 8).all()

    def test_held_block_is_drawn_over_the_others(self):
        state = close_gripper(above_object(0))
        lifted = state.clone()
        lifted[0, world.POSITION] += torch.tensor([0.0, 0.0, 0.06])
        item = lifted[0, world.OBJECT_POSITIONS].view(3, 3)
        item[0, 2] += 0.06
        item[2, :2] = item[0, :2]
        picture = render(lifted, (64, 128))[0, :, :, 64:]
        assert picture[:, 32, 32].tolist() == list(OBJECT_COLOURS[0])

    def test_table_ends_where_the_floor_begins(self):
        picture = render(states_of(episodes_of(1)), (64, 128))[0]
        assert picture[:, 0, 0].tolist() == list(FLOOR)

    def test_blocks_of_pictures_join_seamlessly(self):
        states = states_of(episodes_of(BLOCK + 5))
        together = render(states, (32, 64))
        assert torch.equal(together[-6:], render(states[-6:], (32, 64)))
        assert render(states[:0], (32, 64)).shape == (0, 3, 32, 64)


class TestBatchComposition:
    KEYS = (schema.IMAGE, schema.STATE, schema.FUTURE_FRAMES, schema.SIM_STATES, schema.EXECUTED_MASK, "done", "reward")

    @staticmethod
    def run(episodes: torch.Tensor, actions: torch.Tensor) -> list[TensorDict]:
        env = TableTopEnv(len(episodes), image_size=(32, 64), max_episode_steps=20)
        td, out = env.reset(request(episodes)), []
        for chunk in actions.unbind(1):
            td = env.step(td.set("action", chunk))["next"]
            out.append(td)
        return out

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.integers(0, 8), min_size=1, max_size=5, unique=True), st.integers(0, 2**31 - 1))
    def test_a_slot_does_not_depend_on_the_others(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        episodes = episodes_of(9, init_from=seed % 50)
        actions = 2 * torch.rand(9, 3, schema.CHUNK, schema.ACTION_DIM, generator=generator) - 1
        everyone = self.run(episodes, actions)
        few = self.run(episodes[rows], actions[rows])
        for whole, part in zip(everyone, few, strict=True):
            for key in self.KEYS:
                assert torch.equal(whole[key][rows], part[key]), key

    def test_two_environments_agree_bit_for_bit(self):
        actions = 2 * torch.rand(5, 3, schema.CHUNK, schema.ACTION_DIM) - 1
        for one, other in zip(self.run(episodes_of(5), actions), self.run(episodes_of(5), actions), strict=True):
            assert (one == other).all()


class TestStartStates:
    def test_ids_from_50_on_name_a_stored_state(self):
        demo = TableTopEnv(1).demonstrate(torch.tensor([[3, 7, 1, 0, 0]]), render=False)[0]
        stored = demo["sim_states"]
        env = TableTopEnv(3, start_states={3: stored}, task_ids=[3], image_size=(32, 64))
        ids = torch.tensor([[3, 50, 0, 0, 0], [3, 50 + len(stored) - 2, 5, 1, 1], [3, 7, 1, 2, 2]])
        td = env.reset(request(ids))
        assert torch.equal(td["observation", "state"], world.proprioception(stored[[0, -2, 0]]))
        assert torch.equal(td["observation", "image"], render(stored[[0, -2, 0]], (32, 64)))
        chunk = torch.zeros(3, schema.CHUNK, schema.ACTION_DIM)
        chunk[1] = demo["actions"][-1]
        out = env.step(td.set("action", chunk))["next"]
        assert out[schema.SUCCESS].flatten().tolist() == [False, True, False]
        assert out[schema.EXECUTED_MASK].sum(-1).tolist() == [8, 1, 8]

    def test_without_start_states_every_id_is_a_layout(self):
        env = TableTopEnv(2)
        td = env.reset(request(torch.tensor([[0, 49, 0, 0, 0], [0, 5_000_000_000, 0, 1, 1]])))
        assert not torch.equal(td["observation", "image"][0], td["observation", "image"][1])

    def test_restoring_a_state_continues_its_episode(self):
        demo = TableTopEnv(1).demonstrate(torch.tensor([[4, 11, 1, 0, 0]]), noise=0.2, render=False)[0]
        middle = len(demo["actions"]) // 2
        env = TableTopEnv(1, start_states={4: demo["sim_states"][middle : middle + 1]}, replan_steps=32)
        td = env.reset(request(torch.tensor([[4, 50, 9, 0, 0]])))
        chunk = torch.zeros(1, schema.CHUNK, schema.ACTION_DIM)
        rest = demo["executed_actions"][middle:]
        chunk[0, : len(rest)] = rest
        out = env.step(td.set("action", chunk))["next"]
        assert out[schema.SUCCESS].item()
        assert torch.equal(out[schema.SIM_STATES][0, : len(rest) + 1], demo["sim_states"][middle:])

    def test_bad_start_states_are_named(self):
        good = torch.zeros(2, world.STATE_DIM, dtype=torch.float64)
        for bad in (good.float(), good[:, :5], good[0]):
            with pytest.raises(ValueError, match=r"start_states\[1\]"):
                TableTopEnv(1, start_states={1: bad})
        env = TableTopEnv(1, start_states={1: good})
        with pytest.raises(ValueError, match=r"init_state_id of task 1 must be at most 51, got 52"):
            env.reset(request(torch.tensor([[1, 52, 0, 0, 0]])))
        with pytest.raises(KeyError, match=r"start_states\[2\]"):
            env.reset(request(torch.tensor([[2, 50, 0, 0, 0]])))


class TestOptions:
    @pytest.mark.parametrize("size", [(60, 128), (64, 100), (0, 64), (64,), (64, 64, 3)])
    def test_bad_image_size_is_named(self, size):
        with pytest.raises(ValueError, match="image_size"):
            TableTopEnv(1, image_size=size)

    @pytest.mark.parametrize("options", [{"task_ids": []}, {"init_state_ids": []}])
    def test_nothing_to_deal_is_refused(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            TableTopEnv(1, **options)

    @pytest.mark.parametrize(
        ("options", "name"),
        [({"task_ids": [6]}, "task_id"), ({"task_ids": [-1]}, "task_id"), ({"init_state_ids": [-2]}, "init_state_id")],
    )
    def test_unknown_ids_to_deal_are_refused_at_once(self, options, name):
        with pytest.raises(ValueError, match=name):
            TableTopEnv(1, **options)

    @pytest.mark.parametrize(("ids", "name"), [([6, 0, 0, 0, 0], "task_id"), ([0, -1, 0, 0, 0], "init_state_id")])
    def test_unknown_requested_ids_are_refused(self, ids, name):
        env = TableTopEnv(1)
        with pytest.raises(ValueError, match=name):
            env.reset(request(torch.tensor([ids])))
        with pytest.raises(ValueError, match=name):
            env.demonstrate(torch.tensor([ids]))

    def test_deals_only_what_it_was_told(self):
        env = TableTopEnv(200, task_ids=[1, 4], init_state_ids=[3, 44], image_size=(32, 64))
        td = env.reset()
        assert set(td[schema.TASK_ID].flatten().tolist()) == {1, 4}
        assert set(td[schema.INIT_STATE_ID].flatten().tolist()) == {3, 44}
        assert len(td[schema.ENV_SEED].unique()) == 200
        assert len(td[schema.EPISODE_ID].unique()) == 200
