from __future__ import annotations

import torch

from tests.conftest import make_policy, make_states
from wamrl_torchrl import schema
from wamrl_torchrl.modules.value import ValueHead


def make_head(policy, **options) -> ValueHead:
    torch.manual_seed(0)
    head = ValueHead(policy.model, hidden=16, horizon=8, **options)
    torch.nn.init.normal_(head.head[-1].weight)
    return head


class TestValueHead:
    def test_a_fresh_head_says_zero(self, policy):
        assert ValueHead(policy.model, horizon=8)(make_states(3))["state_value"].tolist() == [[0.0]] * 3

    def test_sees_picture_proprioception_and_time(self, policy):
        head, states = make_head(policy), make_states(3)
        value = head(states.clone())["state_value"]
        for key in (schema.IMAGE, schema.PROPRIO, schema.CHUNK_INDEX):
            other = states.clone()
            other.set(key, other.get(key) + 1)
            assert (head(other)["state_value"] != value).all(), key

    def test_features_are_taken_if_they_are_there(self, policy):
        head, states = make_head(policy), make_states(3)
        first = head(states.clone())
        second = head(first.select("value_features"))
        assert torch.equal(first["state_value"], second["state_value"])

    def test_trains_itself_alone(self, policy):
        head = make_head(policy)
        head(make_states(3))["state_value"].sum().backward()
        assert all(parameter.grad is not None for parameter in head.parameters())
        assert all(parameter.grad is None for parameter in policy.model.parameters())

    def test_state_is_the_heads_own(self):
        head = make_head(make_policy())
        assert all(name.startswith("head.") for name in head.state_dict())

    def test_rows_do_not_depend_on_their_batch(self, policy):
        head, states = make_head(policy), make_states(5)
        alone = torch.cat([head(part.clone())["state_value"] for part in states.split(1)])
        torch.testing.assert_close(head(states)["state_value"], alone, rtol=1e-4, atol=1e-5)
