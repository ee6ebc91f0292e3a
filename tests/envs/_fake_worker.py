"""A simulator process without a simulator, for tests of what happens around one: a start takes milliseconds.

States are a deterministic walk of (env seed, start state, actions), so equality between runs means something. It is
run as a module in place of :mod:`wamrl_torchrl.envs.libero_worker`.
"""

from __future__ import annotations

import os
import sys
import time
import types

import numpy as np

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.0"))
RESET_S = float(os.environ.get("FAKE_RESET_S", "0.0"))


class FakeSim:
    def __init__(self, **_options) -> None:
        self.count, self.walk, self.bddl_file = 0, np.zeros(4), ""

    @staticmethod
    def check_gl() -> None:
        pass

    def reset(self, *, bddl_file, env_seed, state, settle_steps, resume) -> None:
        if os.environ.get("FAKE_CRASH") and os.environ["FAKE_CRASH"] in bddl_file:
            print("about to crash", flush=True)
            os.abort()
        time.sleep(RESET_S)
        self.bddl_file, self.count = bddl_file, 0
        self.walk = np.array([env_seed % 1000, state.sum(), settle_steps, resume], dtype=np.float64)

    def step(self, action) -> bool:
        time.sleep(STEP_S)
        self.count += 1
        self.walk = self.walk * 0.5 + float(action.astype(np.float64).sum())
        return False

    def write_image(self, out) -> None:
        out[:] = int(abs(self.walk[0]) * 7) % 256

    start_image = write_image

    def advance_images(self) -> None:
        pass

    def finish_images(self) -> None:
        pass

    def write_state(self, out) -> None:
        out[:4] = self.walk
        out[4:] = self.count

    def write_sim_state(self, out) -> None:
        out[:] = 0
        out[:4] = self.walk
        out[4] = self.count

    def close(self) -> None:
        pass


if __name__ == "__main__":
    fake = types.ModuleType("wamrl_torchrl.envs.libero_sim")
    fake.LiberoSim = FakeSim  # type: ignore[attr-defined]
    sys.modules["wamrl_torchrl.envs.libero_sim"] = fake
    from wamrl_torchrl.envs import libero_worker

    libero_worker.main()
