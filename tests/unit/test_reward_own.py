"""A reward function of the user's, `module:function`: what is refused beforehand, and what it gives is not guessed."""

import asyncio
import pickle
import sys
import time

import pytest

from kit.core.config.schema import RewardConfig
from kit.core.errors import BadInput, CheckFailed
from reward import reward_functions
from reward.own import RewardFailed

MODULE = """
import asyncio
import torch

def brief(completions, *, most: int = 3, **columns):
    return [float(len(text) <= most) for text in completions]

def few(completions, gold): return [float(text == right) for text, right in zip(completions, gold)]
def seen(prompts, completions, **columns): return [float(len(columns))] * len(completions)
def tensor(completions): return torch.ones(len(completions))
def tensors(completions): return [torch.tensor(True)] * len(completions)
def torn(completions): return [None, float("nan"), *[1] * (len(completions) - 2)]
def short(completions): return [1.0]
def long(completions): return [1.0] * (len(completions) + 1)
def texts(completions): return ["1.0"] * len(completions)
def text(completions): return "1" * len(completions)
def nothing(completions): pass
def pairs(completions): return [torch.ones(2)] * len(completions)
def broken(completions): raise KeyError("its own fault")
def stopped(completions): raise KeyboardInterrupt
def checked(completions):
    from kit.core.errors import CheckFailed
    raise CheckFailed("said on purpose")
def endless(completions): return [1.0, float("-inf"), 0.0]
def huge(completions): return [1.0, 0.0, 1e30]
def strict(completions, *, level: int): return [float(level)] * len(completions)
def demanding(completions, ground_truth): return []
def counted(completions, *, budget=None): return [None] * len(completions)
def runs(completions): return [0.0] * len(completions)
runs.executes_code = True
async def waits(completions, *, seconds: float = 0.0, stubborn: bool = False):
    for _ in range(2 if stubborn else 1):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if not stubborn: raise
    return [1.0, None, 0.5]
async def breaks(completions): raise KeyError("its own fault")
async def forgets(completions): pass
class Later:
    async def __call__(self, completions, gold): return [0.25] * len(completions)
later = Later()
def leveled(completions, level, *, hint, deep: int = 1): return [float(l + h + deep) for l, h in zip(level, hint)]
def best(completions, gold, level=None):
    longest = max(map(len, completions))
    CALLS.append((completions, gold, level))
    return [float(len(one) == longest) for one in completions]
best.group = True
async def worst(completions, problem_id):
    await asyncio.sleep(0.6)
    return [None if one == "" else -1.0 for one in completions]
worst.group = True
CALLS = []

class Judge:
    def __call__(self, completions, gold): return [1.0] * len(completions)
judge = Judge()
word = "no function"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Loads a function of a module that lies in the current directory: own(name, options) -> what TRL calls."""
    (tmp_path / "kit_own_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "kit_own_rewards", raising=False)

    def load(function: str, options: dict | None = None, columns: tuple = (), group: int | None = None, **fields):
        name = f"kit_own_rewards:{function}"
        given = {} if options is None else {"options": {name: options}}
        return reward_functions(RewardConfig(functions=[name], **given, **fields), columns, group)[0][0]

    return load


BATCH = {"prompts": ["p"] * 3, "completions": ["abc", "abcd", ""], "gold": ["abc"] * 3, "problem_id": ["1"] * 3}
BATCH |= {"completion_ids": [[1]] * 3, "trainer_state": None, "log_extra": print, "log_metric": print}


@pytest.mark.parametrize(
    ("function", "options", "rewards"),
    [
        ("brief", None, [1.0, 0.0, 1.0]),
        ("brief", {"most": 9}, [1.0, 1.0, 1.0]),
        ("few", None, [1.0, 0.0, 0.0]),
        ("tensor", None, [1.0, 1.0, 1.0]),
        ("tensors", None, [1.0, 1.0, 1.0]),
        ("torn", None, [None, None, 1.0]),
        ("judge", None, [1.0, 1.0, 1.0]),
        ("strict", {"level": 2}, [2.0, 2.0, 2.0]),
        ("runs", None, [0.0, 0.0, 0.0]),
    ],
)
def test_a_function_gets_what_it_takes_and_its_numbers_are_the_rewards(own, function, options, rewards):
    reward = own(function, options, allow_code_execution=True)
    assert reward(**BATCH) == rewards and reward.__name__ == f"kit_own_rewards:{function}"
    assert pickle.loads(pickle.dumps(reward))(**BATCH) == rewards


def test_a_function_with_further_arguments_gets_all_that_a_run_gives(own):
    # gold, problem_id, completion_ids, TRL's three, pool and budget
    assert own("seen")(**BATCH) == [8.0] * 3


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("absent", None, "cannot be imported: AttributeError"),
        ("word", None, "is a str, not a function"),
        ("best", None, "judges the completions of a group together, and here there are no groups"),
        ("leveled", None, "needs an argument 'level'; a reward gets prompts"),
        ("demanding", None, "needs an argument 'ground_truth'; a reward gets prompts, completions, gold"),
        ("strict", None, r"reward.options.kit_own_rewards:strict.level must be set"),
        ("strict", {"level": "high"}, "level must be an integer"),
        ("brief", {"mots": 1}, "unknown option. Did you mean 'most'"),
        ("runs", None, "runs code that the model wrote"),
    ],
)
def test_one_that_cannot_be_called_is_bad_input(own, function, options, message):
    with pytest.raises(BadInput, match=message):
        own(function, options)


@pytest.mark.parametrize("name", ["no_such_module_anywhere:f", ":f", "kit_own_rewards:"])
def test_a_name_that_leads_nowhere_is_bad_input(own, name):
    with pytest.raises(BadInput, match=f"reward.functions '{name}' cannot be imported"):
        reward_functions(RewardConfig(functions=[name]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", "returned 1 rewards for 3 completions"),
        ("long", "returned 4 rewards for 3 completions"),
        ("texts", "returned '1.0' for completion 0, not a number or None"),
        ("text", "returned a str, not a list with one number or None for each of 3 completions"),
        ("nothing", "returned a NoneType, not a list"),
        ("endless", "returned -inf for completion 1; a reward is at most 1e[+]18 in size. Return None for"),
        ("huge", "returned 1e[+]30 for completion 2"),
        ("pairs", r"returned tensor\(\[1., 1.\]\) for completion 0"),
    ],
)
def test_what_is_no_number_a_completion_ends_the_run_with_what_it_was(own, function, message):
    with pytest.raises(CheckFailed, match=message):
        own(function)(**BATCH)


def test_what_it_raises_is_named_with_the_reward_and_kept_as_the_cause(own):
    with pytest.raises(
        RewardFailed, match=r"^reward 'kit_own_rewards:broken' raised KeyError: 'its own fault'"
    ) as error:
        own("broken")(**BATCH)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(CheckFailed, match=r"^said on purpose$"):
        own("checked")(**BATCH)
    with pytest.raises(KeyboardInterrupt):
        own("stopped")(**BATCH)


def test_what_it_could_not_compute_is_counted_and_stops_the_run(own):
    reward = own("torn", max_unknown_fraction=0.01)
    reward(**BATCH)
    assert reward.unknown_counts == {"none": 2}
    with pytest.raises(CheckFailed, match=r"could not be computed for 4 of the last 6 samples \(none 4\)") as error:
        reward(**BATCH)
    assert "Find out why the function returned None" in str(error.value) and "timeout_s" not in str(error.value)
    itself = own("counted", max_unknown_fraction=0.0)
    assert itself(**BATCH) == [None] * 3 and not itself.unknown_counts, "it takes the budget, so it counts by itself"


def test_it_gets_the_columns_of_the_data_that_it_names(own):
    columns = ("question", "level", "hint", "deep")
    reward = own("leveled", columns=columns)
    data = {"level": [1, 2, 3], "hint": [0.5] * 3, "deep": [9] * 3, "question": ["?"] * 3}
    assert reward(**BATCH, **data) == [2.5, 3.5, 4.5], "deep has a default, so it is an option and not the column"
    assert own("leveled", {"deep": 2}, columns)(**BATCH, **data) == [3.5, 4.5, 5.5]
    assert own("seen", columns=columns)(**BATCH, **data) == [12.0] * 3
    with pytest.raises(BadInput, match=r"gets prompts, .*budget, question, level\.$"):
        own("demanding", columns=("question", "level"))
    with pytest.raises(BadInput, match=r"hint must be set"):
        own("leveled", columns=("level",))


def test_async_functions_are_awaited_and_run_at_the_same_time(own):
    assert asyncio.run(own("later")(**BATCH)) == [0.25] * 3
    rewards = [own("waits", {"seconds": 1.5}) for _ in range(4)]

    async def together():
        return await asyncio.gather(*(reward(**BATCH) for reward in rewards))

    began = time.perf_counter()
    assert asyncio.run(together()) == [[1.0, None, 0.5]] * 4
    assert time.perf_counter() - began < 5, "one after another they take 6 s"
    assert [reward.unknown_counts for reward in rewards] == [{"none": 1}] * 4


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_async_call_that_is_late_is_unknown_and_counted(own, stubborn):
    reward = own("waits", {"seconds": 4.0, "stubborn": stubborn}, request_timeout_s=0.5)

    async def timed():
        began = time.perf_counter()
        return await reward(**BATCH), time.perf_counter() - began

    found, seconds = asyncio.run(timed())
    assert found == [None] * 3 and seconds < 3.5
    assert reward.unknown_counts == {"late": 3}
    with pytest.raises(CheckFailed, match=r"late 6.*\n(.*\n)*Raise reward.request_timeout_s"):
        asyncio.run(reward(**BATCH))


def test_what_an_async_function_raises_ends_the_run(own):
    with pytest.raises(RewardFailed, match="raised KeyError: 'its own fault'") as error:
        asyncio.run(own("breaks")(**BATCH))
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(CheckFailed, match="returned None, not a list"):
        asyncio.run(own("forgets")(**BATCH))


def test_a_group_function_is_called_once_for_each_group(own):
    reward = own("best", columns=("level",), group=2)
    batch = {"prompts": ["p"] * 4, "completions": ["abc", "a", "", "xy"], "gold": ["1", "1", "2", "2"]}
    batch |= {"problem_id": ["1", "1", "2", "2"], "level": [5, 5, 6, 6], "log_metric": print}
    sys.modules["kit_own_rewards"].CALLS.clear()
    assert reward(**batch) == [1.0, 0.0, 0.0, 1.0]
    calls = [(["abc", "a"], ["1", "1"], [5, 5]), (["", "xy"], ["2", "2"], [6, 6])]
    assert sys.modules["kit_own_rewards"].CALLS == calls
    many = {key: value * 4 if isinstance(value, list) else value for key, value in batch.items()}
    later, began = own("worst", group=2), time.perf_counter()
    assert asyncio.run(later(**many)) == [-1.0, -1.0, None, -1.0] * 4
    assert time.perf_counter() - began < 4, "the eight groups of an async function run at the same time: not in 4.8 s"
    assert later.unknown_counts == {"none": 4}
