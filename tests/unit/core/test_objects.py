"""Names of Python objects: import paths, digests that last, and what travels to another process."""

import subprocess
import sys
import textwrap

import pytest

from antiphon.core import objects
from antiphon.core.errors import ConfigError
from antiphon.core.fingerprint import fingerprint
from antiphon.core.registry import Registry, import_path
from tests.raising import raises_with


def importable(prompt, transcript):
    return 1.0


def closure(target):
    def reward(prompt, transcript):
        return float(len(transcript.response) == target)

    return reward


def run_python(source, *arguments):
    done = subprocess.run(
        [sys.executable, "-", *arguments], input=textwrap.dedent(source), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_importable_function_is_named_by_its_path():
    name = objects.name_object(importable, "reward")
    assert name == f"{__name__}:importable" and import_path(name) is importable
    assert not objects.is_attached_name(name)


def test_a_closure_is_attached_and_resolved_by_registries():
    reward = closure(3)
    name = objects.name_object(reward, "reward")
    assert objects.is_attached_name(name) and name.startswith(f"{__name__}:closure.<locals>.reward@")
    assert Registry("reward", {}).resolve(name) is reward


def test_equal_code_has_one_name_and_other_values_another():
    assert fingerprint(closure(3)) == fingerprint(closure(3)) != fingerprint(closure(4))


def test_lambdas_of_one_line_differ():
    short, long = (lambda text: 1.0), (lambda text: 2.0)
    assert fingerprint(short) != fingerprint(long)


SCRIPT = """
import sys
from antiphon.core.fingerprint import fingerprint
HELPED = {helped}
def help_it(text): return len(text) + HELPED
class Reward:
    def __init__(self, scale): self.scale = scale
    def __call__(self, prompt, transcript): return self.scale * help_it(transcript.response)
def reward(prompt, transcript): return float(help_it(transcript.response))
print(fingerprint(reward), fingerprint(Reward({scale})))
"""


def test_digests_are_equal_in_another_process():
    first, again, other = (run_python(SCRIPT.format(helped=helped, scale=2)) for helped in (1, 1, 7))
    assert first == again
    assert first.split()[0] != other.split()[0]  # through the helper, the value that it reads
    scaled = run_python(SCRIPT.format(helped=1, scale=3))
    assert first.split()[0] == scaled.split()[0] and first.split()[1] != scaled.split()[1]


def test_a_function_of_a_script_reaches_another_process(tmp_path):
    sent = tmp_path / "objects"
    script = """
        import pickle, sys
        from antiphon.core.objects import name_object, pack_objects
        FACTOR = 3
        def helper(text): return FACTOR * len(text)
        def reward(text): return helper(text) + 1
        name = name_object(reward, "reward")
        open(sys.argv[1], "wb").write(pickle.dumps((name, pack_objects())))
    """
    run_python(script, str(sent))
    receiver = """
        import pickle, sys
        from antiphon.core.objects import receive_objects
        from antiphon.core.registry import import_path
        name, packed = pickle.load(open(sys.argv[1], "rb"))
        receive_objects(packed)
        print(name.partition("@")[0], import_path(name)("four"))
    """
    assert run_python(receiver, str(sent)) == "__main__:reward 13"


def test_what_stays_here_is_not_sent():
    name = objects.attach_here(closure(5), "data:rows", "0123456789ab")
    assert objects.stays_here(name) and name not in objects.pack_objects()
    assert not objects.stays_here(objects.name_object(closure(6), "reward"))


def test_an_object_that_cannot_be_pickled_is_refused():
    import threading

    lock = threading.Lock()

    def reward(prompt, transcript):
        with lock:
            return 1.0

    with raises_with(ConfigError, key="tasks.0.reward", match="lock"):
        objects.name_object(reward, "tasks.0.reward")


def test_a_value_that_is_no_callable_is_refused():
    with raises_with(ConfigError, key="tasks.0.reward"):
        objects.name_object(object(), "tasks.0.reward")


def test_a_missing_object_is_named():
    name = "__main__:my_reward@0123456789ab"
    with raises_with(ConfigError, key="reward", value=name, match="my_reward"):
        import_path(name, "reward", "reward")


def test_an_object_that_fails_to_unpickle_is_named():
    name = "__main__:broken@0123456789ac"
    objects.receive_objects({name: b"no pickle"})
    with pytest.raises(ConfigError, match="broken"):
        import_path(name)
