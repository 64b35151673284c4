"""Episodes as tokens: equal to what trl 1.16 makes of the same sampled tokens, and templates that cannot do it."""

import asyncio
import copy
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response

from kit.core.errors import BadInput
from kit.environments.trl_contract import methods_of
from kit.rollout.episode_tokens import EpisodeTokens
from kit.rollout.episodes import DONE, LENGTH, TURNS
from tests.unit.episode_cases import HERE, PROMPT, Counter, Script, call, double, play, runner, tokenizer

THINK = "<think>\nLet me add.\n</think>\n\n"
# What the model says in each episode: tools of both kinds, errors, several calls in a turn, calls that are no JSON.
EPISODES = [
    ["The answer is 5.¶"],
    [call("add", number=2) + "¶", call("add", number=3) + "¶", "It is 5.¶"],
    [THINK + call("add", number=2) + call("fail") + "¶", "Broken.¶"],
    [call("wait", seconds=0.01) + call("double", number=4) + "¶", "8¶"],
    [call("nothing", number=1) + "¶", call("add", numbers=1) + call("wait") + "¶", "I give up.¶"],
    ["<tool_call>{no json}</tool_call>¶"],
    [call("add", number=1) + "¶", "endless"],
    [call("add", number=n) + "¶" for n in range(9)],
]
FAMILIES = [None, "qwen3", "qwen3_instruct_2507", "qwen2_5"]


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    yield made
    made.call_soon_threadsafe(made.stop)


def of_trl(family: str | None, texts: list[str], loop: Any, turns: int, longest: int) -> tuple:
    """TRL's own loop without a model: prompt ids, completion ids, mask, messages, calls and failed calls of an
    episode in which the model says `texts`."""
    own, environment = tokenizer(family), Counter()
    if own.response_template is None:
        add_response_schema(own)
    script = Script(own, [texts])
    environment.reset()
    tools = [double, *methods_of(environment).values()]
    by_kind: dict[bool, dict] = {True: {}, False: {}}
    for tool in tools:
        by_kind[inspect.iscoroutinefunction(tool)][tool.__name__] = tool
    made = SimpleNamespace(
        **dict(_is_vlm=False, tools=tools, environment_factories={None: Counter}, _env_tools={None: tools}),
        **dict(_batch_environments=[None], processing_class=own, _tokenizer=own, chat_template_kwargs={}),
        **dict(use_vllm=False, max_completion_length=longest, async_loop=loop, max_tool_calling_iterations=turns - 1),
        **dict(_sync_tool_dicts=[by_kind[False]], _async_tool_dicts=[by_kind[True]]),
        chat_template=get_training_chat_template(own) if family == "qwen3" else None,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        _generate_single_turn=lambda *_, **__: ([script.ids(0, longest)], None),
    )
    made._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(made, messages)
    prompts = [copy.deepcopy(PROMPT)]
    prompt_ids = GRPOTrainer._tokenize_prompts(made, prompts)[0]
    first = script.ids(0, longest)
    said = [[parse_response(own, first, prefix=prompt_ids[0], tools=tools)]]
    given = made, prompts, prompt_ids, [first], said, None, None, {}
    mask, messages, ids, _, calls, failures, _ = GRPOTrainer._tool_call_loop(*given)
    return prompt_ids[0], ids[0], mask[0], messages[0], calls, failures


@pytest.mark.parametrize(("family", "longest"), [*((family, 400) for family in FAMILIES), (None, 60), ("qwen3", 61)])
def test_tokens_masks_and_messages_of_an_episode_are_those_of_trl(family, longest, loop):
    turns = 6
    made = runner(
        tokenizer(family),
        factory=f"{HERE}:Counter",
        tools=f"[{HERE}:double]",
        max_turns=turns,
        rollout__max_completion_length=longest,
    )
    episodes = [[text.replace("¶", "<|im_end|>") for text in texts] for texts in EPISODES]
    ends = set()
    for texts, one in zip(episodes, play(made, episodes), strict=True):
        prompt_ids, ids, mask, messages, calls, failures = of_trl(family, texts, loop, turns, longest)
        assert one.prompt_ids == prompt_ids and one.completion_ids == ids and one.sampled == mask, texts
        assert one.messages == messages, texts
        # TRL makes no call of the last turn; here the environment sees every turn.
        assert (one.tool_calls, sum(one.failures.values())) == (calls + (one.end == TURNS), failures)
        assert len(ids) <= longest
        ends.add(one.end)
    assert ends == ({DONE, LENGTH, TURNS} if longest == 400 else {DONE, LENGTH})


def test_log_probs_and_versions_stay_with_their_tokens():
    made = runner(factory=f"{HERE}:Counter")
    (one,) = play(made, [[call("add", number=2) + "<|im_end|>", "5<|im_end|>"]], has_logps=True)
    turns = [sum(one.sampled[: one.sampled.index(0)]), 2]
    assert [lp for lp, mine in zip(one.logps, one.sampled, strict=True) if mine] == [
        -0.25 - number for turn in turns for number in range(turn)
    ]
    assert {lp for lp, mine in zip(one.logps, one.sampled, strict=True) if not mine} == {0.0}
    assert one.versions == [3, 4] and one.turns == 2


def test_only_what_the_model_sampled_is_marked():
    (one,) = play(runner(factory=f"{HERE}:Counter"), [[call("add", number=2) + "<|im_end|>", "5<|im_end|>"]])
    text = "".join(
        tokenizer().decode([token]) if mine else "·"
        for token, mine in zip(one.completion_ids, one.sampled, strict=True)
    )
    assert text.replace("·", "") == call("add", number=2) + "<|im_end|>5<|im_end|>"
    assert "<|im_start|>tool\n2<|im_end|>" in tokenizer().decode(one.completion_ids)


BROKEN = "{{ messages[0]['content'] }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + (m['content'] or '') }}"
    "{% if loop.last %}!{% endif %}{{ '<|im_end|>' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "takes_tools", "said"),
    [
        (BROKEN, True, "cannot render tools"),
        (LAST, False, "renders a turn differently once another message follows"),
    ],
)
def test_a_template_that_cannot_do_it_is_refused(template, takes_tools, said):
    own = tokenizer()
    own.chat_template = template
    with pytest.raises(BadInput, match=said):
        EpisodeTokens(own, {}, takes_tools)


def test_a_template_whose_calls_nothing_can_parse_is_refused():
    own = tokenizer()
    own.response_template = None
    with pytest.raises(BadInput, match="nothing can parse the tool calls"):
        EpisodeTokens(own, {}, True)
    EpisodeTokens(own, {}, False)  # without tools a turn is text


def test_a_template_that_changes_what_came_before_is_replaced_by_trls():
    own = tokenizer("qwen3")
    made = EpisodeTokens(own, {}, True)
    assert made.template == get_training_chat_template(own) and own.chat_template != made.template
    assert EpisodeTokens(tokenizer("qwen2_5"), {}, True).template is None
    # The prompt is the one that the model is asked with without an environment.
    assert made.prompt_ids(PROMPT, None) == own.apply_chat_template(
        PROMPT, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("most", [1, 5, 100, None])
def test_a_long_answer_is_cut_and_says_so(most):
    tokens = EpisodeTokens(tokenizer(), {}, True)
    message = {"role": "tool", "name": "add", "content": "1234567890"}
    found = tokens.cut(message, most, 40)["content"]
    expected = {1: "1 [cut: 1 of 10 characters]", 5: "12345 [cut: 5 of 10 characters]"}
    assert found == expected.get(most, "1234567890")
