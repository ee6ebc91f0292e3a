from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from wamrl_torchrl import schema
from wamrl_torchrl.data.episodes import EpisodeStore, episodes_from_rollout, validate_episode
from wamrl_torchrl.data.stats import DatasetStats


def make_episode(steps: int, *, number: int = 0, decisions: int = 1, **changes) -> TensorDict:
    """An episode that tells the time: red and state[0] are the step, green the number, action[0] is step / 1000."""
    frames = steps // 4 + 1
    pictures = torch.zeros(frames, 3, 2, 4, dtype=torch.uint8)
    pictures[:, 0] = (4 * torch.arange(frames))[:, None, None].byte()
    pictures[:, 1] = number
    states = torch.zeros(frames, 8)
    states[:, 0] = 4 * torch.arange(frames)
    actions = torch.full((steps, 7), 0.5)
    actions[:, 0] = torch.arange(steps) / 1000
    actions[:, -1] = torch.where(torch.arange(steps) % 2 == 0, 1, -1)
    ids = {key: torch.tensor([number]) for key in ("task_id", "init_state_id", "env_seed")}
    data = {
        "frames": pictures,
        "states": states,
        "is_decision": torch.arange(frames) % decisions == 0,
        "actions": actions,
        "success": torch.tensor([True]),
        **ids,
        **changes,
    }
    return TensorDict({key: value for key, value in data.items() if value is not None}, batch_size=[])


def make_store(*steps: int, max_episodes: int | None = None) -> EpisodeStore:
    store = EpisodeStore(max_episodes=max_episodes)
    for number, length in enumerate(steps):
        store.add(make_episode(length, number=number))
    return store


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same(first: TensorDict, second: TensorDict) -> None:
    assert set(first.keys()) == set(second.keys())
    for key in first.keys():  # noqa: SIM118
        assert torch.equal(first[key], second[key]), key


class TestValidation:
    @pytest.mark.parametrize("steps", [1, 3, 4, 5, 8, 33])
    def test_good(self, steps):
        validate_episode(make_episode(steps))
        validate_episode(make_episode(steps, sim_states=torch.zeros(steps + 1, 5, dtype=torch.float64)))

    @pytest.mark.parametrize("key", ["frames", "states", "is_decision", "actions", "task_id", "env_seed", "success"])
    def test_missing(self, key):
        with pytest.raises(KeyError, match=f"lacks.*{key}"):
            validate_episode(make_episode(8, **{key: None}))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"frames": torch.zeros(3, 3, 2, 4)}, "'frames' must be torch.uint8.*found torch.float32"),
            ({"frames": torch.zeros(2, 3, 2, 4, dtype=torch.uint8)}, r"'frames'.*T=8 actions F=3"),
            ({"frames": torch.zeros(3, 2, 4, 3, dtype=torch.uint8)}, "'frames'"),
            ({"states": torch.zeros(9, 8)}, r"'states' must be \('F', 8\), found \(9, 8\); with T=8 actions F=3"),
            ({"actions": torch.zeros(8, 6)}, r"'actions' must be \('T', 7\)"),
            ({"actions": torch.zeros(0, 7)}, "'actions' must hold at least one action"),
            ({"actions": torch.full((8, 7), torch.nan)}, "'actions' holds values that are not finite"),
            ({"task_id": torch.zeros(1)}, "'task_id' must be torch.int64"),
            ({"success": torch.tensor(True)}, "'success' must be torch.bool"),
            ({"sim_states": torch.zeros(8, 5, dtype=torch.float64)}, r"'sim_states'.*T\+1=9"),
            ({"is_decision": torch.tensor([False, False, True])}, "'is_decision' marks no frame"),
            ({"rewards": torch.zeros(8)}, r"unknown keys \['rewards'\]"),
        ],
    )
    def test_bad(self, changes, message):
        with pytest.raises(ValueError, match=message):
            validate_episode(make_episode(8, **changes))


class TestStore:
    def test_is_a_sequence(self):
        store = make_store(5, 9)
        assert len(store) == 2
        assert_same(store[1], make_episode(9, number=1))
        assert [len(episode["actions"]) for episode in store] == [5, 9]

    def test_drops_the_oldest(self):
        store = make_store(5, 6, 7, max_episodes=2)
        assert [int(episode["task_id"]) for episode in store] == [1, 2]
        windows = store.sample_windows(64, generator=generator())
        assert set(windows["task_id"].flatten().tolist()) == {1, 2}

    def test_sampling_leaves_episodes_as_they_were_and_keeps_frames_once(self):
        store = make_store(5, 9, 40)
        store.sample_windows(4, generator=generator())
        for number, steps in enumerate((5, 9, 40)):
            assert_same(store[number], make_episode(steps, number=number))
        storages = {episode["frames"].untyped_storage().data_ptr() for episode in store}
        assert len(storages) == 1

    def test_added_episode_is_not_changed(self):
        episode, store = make_episode(9), make_store(5)
        frames = episode["frames"]
        store.add(episode.lock_())
        store.sample_windows(4, generator=generator())
        assert episode["frames"] is frames

    def test_new_episodes_are_sampled(self):
        store = make_store(5)
        store.sample_windows(4, generator=generator())
        store.add(make_episode(200, number=7))
        assert 7 in store.sample_windows(64, generator=generator())["task_id"]

    def test_feeds_the_statistics(self):
        stats = DatasetStats.from_episodes(make_store(5, 40))
        assert (stats.state_min[0], stats.state_max[0]) == (0, 40)

    def test_one_picture_size(self):
        store = make_store(5)
        with pytest.raises(ValueError, match=r"\(3, 4, 4\), the store holds \(3, 2, 4\)"):
            store.add(make_episode(8, frames=torch.zeros(3, 3, 4, 4, dtype=torch.uint8)))
        assert len(store) == 1

    def test_errors(self):
        with pytest.raises(ValueError, match="max_episodes"):
            EpisodeStore(max_episodes=0)
        assert EpisodeStore().num_windows == 0
        with pytest.raises(ValueError, match="empty episode store"):
            EpisodeStore().sample_windows(1, generator=generator())


class TestWindows:
    def test_shapes_and_dtypes(self):
        windows = make_store(40, 6).sample_windows(5, generator=generator())
        expected = {
            schema.IMAGE: (torch.uint8, (5, 3, 2, 4)),
            schema.STATE: (torch.float32, (5, 8)),
            "task_id": (torch.int64, (5, 1)),
            "video": (torch.uint8, (5, 9, 3, 2, 4)),
            "image_is_pad": (torch.bool, (5, 9)),
            "actions": (torch.float32, (5, 32, 7)),
            "action_is_pad": (torch.bool, (5, 32)),
        }
        assert {key: (windows[key].dtype, tuple(windows[key].shape)) for key in expected} == expected
        assert set(windows.keys(True, True)) == set(expected)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(1, 80), min_size=1, max_size=5), st.integers(0, 2**31))
    def test_every_window_is_a_cut_of_its_episode(self, lengths, seed):
        """Against a plain per-window reference."""
        windows = make_store(*lengths).sample_windows(32, generator=generator(seed))
        for window in windows.unbind(0):
            number, start = int(window["task_id"]), int(window[schema.STATE][0])
            steps = lengths[number]
            assert start % 4 == 0
            assert start < steps
            assert torch.equal(window[schema.IMAGE], window["video"][0])
            at = start + 4 * torch.arange(9)
            assert torch.equal(window["image_is_pad"], at > steps)
            assert torch.equal(window["video"][:, 0, 0, 0].long(), at.clamp(max=steps // 4 * 4))
            assert (window["video"][:, 1] == number).all()
            episode, at = make_episode(steps), start + torch.arange(32)
            pad = at >= steps
            assert torch.equal(window["action_is_pad"], pad)
            actions = window["actions"]
            assert torch.equal(actions[~pad], episode["actions"][start : start + 32])
            assert not actions[pad][:, :6].any()
            assert (actions[pad][:, 6] == episode["actions"][-1, 6]).all()

    def test_uniform_over_decisions_not_over_episodes(self):
        store = make_store(4, 36)  # 1 and 9 decisions
        assert store.num_windows == 10
        windows = store.sample_windows(20_000, generator=generator())
        number, start = windows["task_id"].squeeze(-1), windows[schema.STATE][:, 0].long() // 4
        cells = torch.bincount(number * (1 + start), minlength=10).double()
        # Chi-squared with 9 degrees of freedom: 27.9 is the 0.1 % point.
        assert ((cells - 2000) ** 2 / 2000).sum() < 27.9

    def test_starts_only_at_decisions(self):
        store = EpisodeStore()
        store.add(make_episode(41, decisions=2))
        assert store.num_windows == 6
        windows = store.sample_windows(200, generator=generator())
        assert set(windows[schema.STATE][:, 0].tolist()) == {0, 8, 16, 24, 32, 40}

    def test_a_frame_behind_the_last_action_starts_nothing(self):
        assert make_store(8).num_windows == 2
        assert make_store(9).num_windows == 3

    def test_generator_decides(self):
        store = make_store(40, 60)
        first, second = (store.sample_windows(16, generator=generator(3)) for _ in range(2))
        assert torch.equal(first["video"], second["video"])
        assert not torch.equal(first["video"], store.sample_windows(16, generator=generator(4))["video"])


class TestDisk:
    @pytest.mark.parametrize("sampled", [False, True])
    def test_round_trip(self, tmp_path, sampled):
        store = make_store(5, 9)
        store.add(make_episode(6, number=2, sim_states=torch.randn(7, 5, dtype=torch.float64)))
        if sampled:
            store.sample_windows(2, generator=generator())
        store.save(tmp_path / "a" / "store")
        loaded = EpisodeStore.load(tmp_path / "a" / "store")
        assert len(loaded) == 3
        for one, other in zip(store, loaded, strict=True):
            assert_same(one, other)
        first, second = (each.sample_windows(8, generator=generator()) for each in (store, loaded))
        assert torch.equal(first["actions"], second["actions"])
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["store"]

    def test_views_are_written_alone(self, tmp_path):
        """After sampling an episode is a view of all of them; its file must not hold the others."""
        store = make_store(*[40] * 20)
        store.sample_windows(1, generator=generator())
        store.save(tmp_path / "store")
        sizes = {path.stat().st_size for path in (tmp_path / "store").iterdir()}
        assert max(sizes) < 4000

    def test_bounded_load_reads_the_newest(self, tmp_path):
        make_store(5, 6, 7).save(tmp_path / "store")
        assert [int(e["task_id"]) for e in EpisodeStore.load(tmp_path / "store", max_episodes=2)] == [1, 2]

    def test_refuses_to_overwrite(self, tmp_path):
        make_store(5).save(tmp_path / "store")
        with pytest.raises(FileExistsError, match="new directory"):
            make_store(6).save(tmp_path / "store")

    def test_an_interrupted_save_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*args):
            raise OSError("No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            make_store(5).save(tmp_path / "store")
        assert not list(tmp_path.iterdir())

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="not a saved episode store"):
            EpisodeStore.load(tmp_path / "store")

    def test_damaged_file(self, tmp_path):
        make_store(5, 6).save(tmp_path / "store")
        path = tmp_path / "store" / "episode_000001.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"cannot read .*episode_000001\.safetensors"):
            EpisodeStore.load(tmp_path / "store")


def collect(env, *, tasks: list[int], steps: int = 6) -> TensorDict:
    """Whole episodes, one per slot, end to end; task -1 parks a slot. Actions are step + column / 10."""
    ids = {key: torch.tensor(tasks)[:, None] for key in ("task_id", "init_state_id", "env_seed", "group_id")}
    episode_id = torch.where(torch.tensor(tasks) < 0, -1, torch.arange(len(tasks)) + 10)[:, None]
    state = env.reset(TensorDict({**ids, "episode_id": episode_id}, batch_size=env.batch_size))
    rows = [[] for _ in tasks]
    running = [True] * len(tasks)
    for _ in range(steps):
        state["action"] = (state["observation", "state"][:, :1, None] + torch.arange(32)[:, None]) / 100 + torch.zeros(
            7
        )
        step = env.step(state)
        for slot in range(len(tasks)):
            if running[slot]:
                rows[slot].append(step[slot].clone())
                running[slot] = not bool(step[slot]["next", "done"])
        state = step["next"].exclude("reward", "reward_task")
    return torch.stack([row for slot in rows for row in slot])


class TestFromRollout:
    @pytest.mark.parametrize("succeed_after", [1, 3, 4, 7, 8, 9, 14, 16, 21])
    def test_rebuilds_the_episode(self, counting_env, succeed_after):
        env = counting_env(1, succeed_after=succeed_after)
        (episode,) = episodes_from_rollout(collect(env, tasks=[4]))
        validate_episode(episode)
        frames = 4 * torch.arange(succeed_after // 4 + 1)
        assert torch.equal(episode["frames"][:, 0, 0, 0].long(), frames)
        assert torch.equal(episode["is_decision"], (frames % 8 == 0) & (frames < succeed_after))
        assert torch.equal(episode["states"][:, 0].long(), (frames - 1).clamp(min=0) // 8 * 8 + 8 * (
            (frames % 8 == 0) & (frames > 0) & (frames < succeed_after)
        ))  # fmt: skip
        torch.testing.assert_close(episode["actions"][:, 0], torch.arange(succeed_after) / 100)
        assert [int(episode[key]) for key in ("task_id", "init_state_id", "env_seed")] == [4, 4, 4]
        assert episode["success"].tolist() == [True]

    def test_many_episodes_in_order_without_parked_slots_and_failures(self, counting_env):
        rollout = collect(counting_env(5, succeed_after=14), tasks=[2, 3, -1, 4, 6])
        episodes = episodes_from_rollout(rollout)
        assert [int(episode["task_id"]) for episode in episodes] == [2, 4, 6]
        assert [int(episode["frames"][0, 1, 0, 0]) for episode in episodes] == [10, 13, 14]
        every = episodes_from_rollout(rollout, only_success=False)
        assert [int(episode["task_id"]) for episode in every] == [2, 3, 4, 6]
        assert [episode["success"].item() for episode in every] == [True, False, True, True]
        assert [len(episode["actions"]) for episode in every] == [14, 30, 14, 14]

    def test_nothing_to_keep(self, counting_env):
        assert episodes_from_rollout(collect(counting_env(2), tasks=[1, 3])) == []
        assert episodes_from_rollout(collect(counting_env(1), tasks=[-1])) == []

    def test_simulator_states(self, counting_env):
        rollout = collect(counting_env(2, succeed_after=14), tasks=[2, 4])
        start = rollout["observation", "state"][:, :1]
        executed = rollout["next", "executed_mask"].sum(-1, keepdim=True)
        at = start + torch.minimum(torch.arange(9), executed)  # the last one is repeated
        rollout["next", "sim_states"] = at[..., None].expand(-1, -1, 3).double()
        for episode in episodes_from_rollout(rollout):
            validate_episode(episode)
            assert torch.equal(episode["sim_states"][:, 0], torch.arange(15.0, dtype=torch.float64))

    def test_feeds_a_store(self, counting_env):
        store = EpisodeStore()
        for episode in episodes_from_rollout(collect(counting_env(2, succeed_after=21), tasks=[2, 4])):
            store.add(episode)
        assert store.num_windows == 6
        windows = store.sample_windows(32, generator=generator())
        assert set(windows[schema.STATE][:, 0].tolist()) == {0, 8, 16}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"replan_steps": 10}, r"frame_offsets=\(4, 8\) lack \[2, 6, 10\].*replan_steps to a multiple of 4"),
            ({"replan_steps": 12}, r"frame_offsets=\(4, 8\) lack \[12\]"),
        ],
    )
    def test_environment_options_that_leave_gaps(self, counting_env, options, message):
        rollout = collect(counting_env(1, succeed_after=20, **options), tasks=[2])
        with pytest.raises(ValueError, match=message):
            episodes_from_rollout(rollout)

    def test_other_offsets(self, counting_env):
        env = counting_env(1, succeed_after=20, replan_steps=12, frame_offsets=(2, 4, 8, 10, 12))
        rollout = collect(env, tasks=[2])
        (episode,) = episodes_from_rollout(rollout, frame_offsets=(2, 4, 8, 10, 12))
        assert episode["frames"][:, 0, 0, 0].tolist() == [0, 4, 8, 12, 16, 20]
        with pytest.raises(ValueError, match="has 5 frames, but frame_offsets"):
            episodes_from_rollout(rollout, frame_offsets=(4, 8, 12))
        with pytest.raises(ValueError, match="pass the frame_offsets of the environment"):
            episodes_from_rollout(rollout, frame_offsets=(8, 10, 12, 2, 4))

    def test_every_frame_makes_any_replan_good(self, counting_env):
        env = counting_env(1, succeed_after=21, replan_steps=10, frame_offsets="every")
        (episode,) = episodes_from_rollout(collect(env, tasks=[2]), frame_offsets=env.frame_offsets)
        validate_episode(episode)
        assert episode["frames"][:, 0, 0, 0].tolist() == [0, 4, 8, 12, 16, 20]
        assert episode["is_decision"].tolist() == [True, False, False, False, False, True]
        assert episode["states"][:, 0].tolist() == [0, 0, 0, 10, 10, 20]

    @pytest.mark.parametrize("replan", [3, 7, 8, 10])
    @pytest.mark.parametrize("succeed_after", [1, 8, 14, 21])
    def test_rendered_frames_are_the_live_ones(self, counting_env, replan, succeed_after):
        """From states that tell the time, and of successful episodes only."""
        env = counting_env(4, succeed_after=succeed_after, replan_steps=replan, frame_offsets="every")
        rollout = collect(env, tasks=[2, 3, -1, 4], steps=10)
        executed = rollout["next", "executed_mask"].sum(-1, keepdim=True)
        at = rollout["observation", "state"][:, :1] + torch.minimum(torch.arange(replan + 1), executed)
        ids = rollout["episode_id"].expand_as(at)
        rollout["next", "sim_states"] = torch.stack([at, ids], -1).double()
        live = episodes_from_rollout(rollout, frame_offsets=env.frame_offsets)

        def render(episodes):
            assert [int(episode["task_id"]) for episode in episodes] == [2, 4]
            frames = [torch.zeros(len(episode["sim_states"]), 3, 2, 4, dtype=torch.uint8) for episode in episodes]
            for out, episode in zip(frames, episodes, strict=True):
                out[:, :2] = episode["sim_states"].byte()[:, :, None, None]
            return frames

        rollout = rollout.exclude(schema.IMAGE, ("next", "future_frames"), ("next", "future_mask"))
        rendered = episodes_from_rollout(rollout, render=render)
        assert len(live) == len(rendered) == 2
        for one, other in zip(live, rendered, strict=True):
            validate_episode(other)
            assert_same(one, other)

    def test_rendering_needs_simulator_states(self, counting_env):
        with pytest.raises(KeyError, match="sim_states"):
            episodes_from_rollout(collect(counting_env(1), tasks=[2]), render=lambda episodes: [])

    def test_parts_of_episodes(self, counting_env):
        rollout = collect(counting_env(2, succeed_after=21), tasks=[2, 4])
        assert len(rollout) == 6
        for rows, row in (([0, 1, 2, 3, 4], 5), ([1, 2], 0), ([0, 2], 1), ([0, 1, 5], 2), ([0, 1, 2, 4, 5], 3)):
            with pytest.raises(ValueError, match=f"breaks at row {row} of {len(rows)}"):
                episodes_from_rollout(rollout[rows])

    def test_batch_dims_and_keys(self, counting_env):
        rollout = collect(counting_env(1), tasks=[2])
        with pytest.raises(ValueError, match="reshape"):
            episodes_from_rollout(rollout[None])
        with pytest.raises(KeyError, match="executed_mask"):
            episodes_from_rollout(rollout.exclude(("next", "executed_mask")))
