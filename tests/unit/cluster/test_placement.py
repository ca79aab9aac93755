"""Which devices each role has: what the grammar says, who shares what, and what cannot be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cluster.base import Gpu, Node
from antiphon.cluster.config import ROLES, PlacementConfig
from antiphon.cluster.devices import gpu_class, with_visible_gpus
from antiphon.cluster.placement import assign_devices, find_problems, gpus_of, parse_devices
from antiphon.core.errors import ConfigError
from tests.raising import raises_with

SMALL = [Node(cores=(0, 1))]
LARGE = [
    Node("a", cores=tuple(range(8)), gpus=tuple(Gpu(str(n), "h800") for n in range(4))),
    Node("b", cores=tuple(range(8)), gpus=tuple(Gpu(str(n), "h20") for n in range(4))),
    Node("c", cores=tuple(range(8)), gpus=tuple(Gpu(str(n), "h800") for n in range(4))),
]
WORKERS = {"learner": 1, "engine": 2}


def placed(nodes=LARGE, workers=WORKERS, **roles):
    return assign_devices(PlacementConfig(**roles).roles, nodes, workers)


def test_gpus_are_counted_through_nodes_and_within_a_class():
    assert placed(engine="gpu:2-5").places["engine"][1].node == "b"
    first, second = placed(engine="h800:2-5").places["engine"]
    assert (first.node, first.gpus, second.node, second.gpus) == ("a", ("2", "3"), "c", ("0", "1"))
    (one,) = placed(learner="node1.gpu:3").places["learner"]
    assert (one.node, one.gpus, one.cores) == ("b", ("3",), ())
    assert placed(learner="gpu:0, gpu:2").place("learner").gpus == ("0", "2")


def test_cores_are_named_or_counted_exclusively():
    found = placed(SMALL, {"learner": 1, "engine": 1}, learner="cpu:1", engine="cpu:0-0")
    assert (found.place("learner").cores, found.place("engine").cores) == ((1,), (0,))
    found = placed(learner="cpu:8", environment="cpu:8")
    assert {found.place("learner").node, found.place("environment").node} == {"a", "b"}
    assert not found.shared


def test_missing_devices_of_patient_roles_may_come_later():
    config = {"engine": "node0.gpu:0-1, node7.gpu:0-1, node2.gpu:0-1"}
    found = assign_devices(config, [*LARGE[:2], Node()], {"engine": 3}, patient=("engine",))
    assert found.place("engine", 0).gpus == ("0", "1")
    assert found.known_places("engine") == [found.place("engine", 0)]
    for number in (1, 2):
        with raises_with(ConfigError, key="placement.engine", value=number):
            found.place("engine", number)
    back = assign_devices(config, LARGE, {"engine": 3}, patient=("engine",))
    assert [place.node for place in back.known_places("engine")] == ["a", "c"]
    with raises_with(ConfigError, key="placement.engine", value="node7"):
        assign_devices(config, LARGE, {"engine": 3})


def test_what_a_node_had_keeps_its_numbers_when_it_has_left():
    left = [LARGE[0], replace(LARGE[1], id="", has_left=True), LARGE[2]]
    config = {"engine": "gpu:2-9", "environment": "cpu:8"}
    found = assign_devices(config, left, {"engine": 4}, patient=("engine",))
    assert [place and (place.node, place.gpus) for place in found.places["engine"]] == [
        ("a", ("2", "3")),
        None,
        None,
        ("c", ("0", "1")),
    ]
    both = {"engine": "node7.gpu:0", "judge": "node1.gpu:0"}
    assert not assign_devices(both, left, {"engine": 1, "judge": 1}, patient=("engine", "judge")).known_places("judge")
    assert assign_devices({"environment": "node1.cpu:1"}, LARGE, {}).place("environment").node == "b"
    for role, lost in (("engine", "gpu:2-9"), ("environment", "node1.cpu:1"), ("learner", "node1.cpu:0-0")):
        with raises_with(ConfigError, match="node1 .* left", key=f"placement.{role}", value=lost):
            placed(left, **{role: lost})


@pytest.mark.parametrize(
    ("roles", "lent"),
    [
        ({"learner": "cpu:1", "engine": "cpu:1"}, []),
        ({"learner": "cpu:0-0", "engine": "cpu:0-1"}, [0]),
        ({"learner": "cpu:2", "engine": "with learner"}, [0, 1]),
        ({"reference": "cpu:1-1", "engine": "cpu:0-1"}, [1]),
    ],
    ids=["disaggregated", "overlapping", "co-located", "with another model"],
)
def test_engines_share_devices_with_training_roles(roles, lent):
    workers = {"learner": 1, "reference": 1, "engine": 1 if roles["engine"] == "cpu:1" else 2}
    found = placed(SMALL, workers, **roles)
    assert [number for number in range(workers["engine"]) if found.shares_devices("engine", number)] == lent
    assert found.shared == bool(lent)


def test_engine_on_a_core_runs_while_the_learner_trains():
    machine = Node(cores=(0, 1), gpus=(Gpu("0", "h200"),))
    found = placed([machine], learner="gpu:0", engine="gpu:0, cpu:1")
    assert [(place.gpus, place.cores) for place in found.places["engine"]] == [(("0",), ()), ((), (0,))]
    assert [found.shares_devices("engine", number) for number in range(2)] == [True, False]


def test_rewards_have_all_their_gpus_in_one_place():
    place = placed(learner="gpu:0", engine="gpu:4-5", reward="gpu:2-3, cpu:2").place("reward")
    assert (place.node, place.gpus, place.cores) == ("a", ("2", "3"), (0, 1))


@pytest.mark.parametrize("role", ["reward", "environment"])
def test_what_runs_beside_all_others_has_one_place_on_each_node(role):
    found = placed(**{role: "node1.cpu:0-1, node0.cpu:2-2"}).places[role]
    assert [(place.node, place.cores) for place in found] == [("b", (0, 1)), ("a", (2,))]
    assert [place.node for place in placed(**{role: "anywhere"}).places[role]] == [node.id for node in LARGE]
    assert placed(reward="gpu:3-4").places["reward"][1].gpus == ("0",)


@pytest.mark.parametrize(
    ("roles", "role", "device"),
    [
        ({"learner": "gpu:0-16"}, "learner", "gpu:0-16"),
        ({"engine": "h800:6-9"}, "engine", "h800:6-9"),
        ({"engine": "cpu:25"}, "engine", "cpu:25"),
        ({"learner": "node7.gpu:0"}, "learner", "node7"),
        ({"learner": "gpu:3-4"}, "learner", "node0.gpu:3, node1.gpu:0"),
        ({"engine": "gpu:0-2"}, "engine", 3),
        ({"engine": "gpu:0-3", "judge": "gpu:3"}, "judge", "node0.gpu:3"),
        ({"environment": "gpu:0"}, "environment", "node0.gpu:0"),
        ({"engine": "gpu:0-1", "reward": "gpu:1-2"}, "reward", "node0.gpu:1"),
        ({"learner": "gpu:0", "reward": "with learner"}, "reward", "node0.gpu:0"),
        ({"learner": "gpu:0", "reward_model": "gpu:0"}, "reward_model", "node0.gpu:0"),
    ],
)
def test_conflicts_name_role_and_device(roles, role, device):
    with raises_with(ConfigError, key=f"placement.{role}", value=device):
        placed(**roles)


@pytest.mark.parametrize("text", ["seven", "gpu:7-0", "cpu:0"])
def test_text_that_names_no_devices_is_refused(text):
    with raises_with(ConfigError, value=text):
        parse_devices(f"gpu:0, {text}")


@pytest.mark.parametrize(
    "roles",
    [
        {"engine": "gpu:0, seven"},
        {"engine": "with pilot"},
        {"engine": "with learner"},
        {"engine": "with judge", "judge": "with engine"},
    ],
)
def test_invalid_placements_are_problems_of_their_role(roles):
    assert {role for role, _ in find_problems(roles)} == {*roles}


parts = st.builds(
    lambda node, kind, first, more: f"{node}{kind}:{first}-{first + more}",
    st.sampled_from(["", "node0.", "node2."]),
    st.sampled_from(["gpu", "cpu", "h800"]),
    st.integers(0, 5),
    st.integers(0, 5),
)
devices = st.one_of(st.just(""), st.integers(1, 9).map("cpu:{}".format), st.lists(parts, min_size=1).map(",".join))


def test_gpus_have_other_names_where_others_say_which_they_are(monkeypatch):
    both = placed(engine="node1.gpu:1-2", learner="node1.gpu:2").places["engine"]
    assert gpus_of((*both, both[1], None)) == ("1", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert [with_visible_gpus(place, gpus_of(both)).gpus for place in both] == [("0",), ("3",)]
    on_a_core = placed(learner="cpu:1").places["learner"][0]
    assert with_visible_gpus(on_a_core, ()) == on_a_core


@given(roles=st.fixed_dictionaries(dict.fromkeys(ROLES, devices)), engines=st.integers(1, 6))
def test_placement_gives_each_worker_devices_of_one_node(roles, engines):
    workers = {"learner": 1, "reference": 1, "engine": engines, "critic": 2}
    try:
        found = placed(workers=workers, **roles)
    except ConfigError as error:
        assert str(error).startswith("placement.")
        return
    assert set(found.places) == {role for role, text in roles.items() if text}
    taken = {
        (place.node, kind, number)
        for role in ("learner", "reference", "critic", "teacher")
        for place in found.places.get(role, ())
        for kind, numbers in (("cpu", place.cores), ("gpu", place.gpus))
        for number in numbers
    }
    for role, places in found.places.items():
        by_node = role in ("reward", "environment")
        assert len(places) == (len({place.node for place in places}) if by_node else workers.get(role) or 1)
        for number, place in enumerate(places):
            own = {(place.node, "cpu", core) for core in place.cores} | {(place.node, "gpu", gpu) for gpu in place.gpus}
            assert own
            assert found.shares_devices(role, number) == (role in ("engine", "judge") and bool(own & taken))


@given(st.text())
def test_whatever_is_written_is_read_or_refused(text):
    try:
        assert parse_devices(text)
    except ConfigError as error:
        assert error.value in [part.strip() for part in text.split(",")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA H800 PCIe", "h800"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "4090"), ("x", "")],
)
def test_the_class_of_a_gpu(name, kind):
    assert gpu_class(name) == kind


def test_auto_is_short_for_the_planner():
    assert PlacementConfig.model_validate("auto") == PlacementConfig(auto=True)
