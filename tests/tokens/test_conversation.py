"""Token-in, token-out: what was sampled stays, and the mask says what it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.tokens.conversation import Conversation
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt, StopReason, TokenBatch


def _mask(conversation):
    return conversation.mask.astype(int).tolist()


def test_t01_the_stop_id_is_trained_once_even_if_it_is_the_padding_id():
    prompt, pad = [5, 2, 6], 2
    rows = [Conversation.start(prompt).append_sampled(c, np.zeros(len(c)), 0) for c in ([7, 8, 2], [7, 2])]
    assert [_mask(r)[3:] for r in rows] == [[1, 1, 1], [1, 1]]
    width = 8
    tokens = np.full((2, width), pad, np.int32)
    mask = np.zeros((2, width), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row.tokens, row.mask
    batch = TokenBatch.from_rows(tokens, mask, reward=[1.0, 0.0])
    assert batch.mask[:, 3:].astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.segments.tolist() == [
        [1] * 6 + [0] * 2,
        [1] * 5 + [0] * 3,
    ]  # the 2 in the prompt is attended to

    def loss(logprob):
        return -jnp.sum(jnp.where(batch.mask, logprob, 0.0))

    gradient = jax.grad(loss)(jnp.zeros((2, width)))
    np.testing.assert_array_equal(gradient, -batch.mask.astype(np.float32))


def test_t06_only_what_the_policy_wrote_is_trained(chatml):
    conversation = (
        Conversation.start([10, 11, 12])
        .append_sampled([20, 21], [-0.1, -0.2], 3)
        .append_given([30, 31, 32, 33])
        .append_sampled([22, 23], [-0.3, -0.4], 4, kv_version=3)
    )
    assert _mask(conversation) == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert conversation.version.tolist() == [-1] * 3 + [3, 3] + [-1] * 4 + [4, 4]
    assert conversation.kv_version.tolist() == [-1] * 3 + [3, 3] + [-1] * 4 + [3, 3]
    np.testing.assert_allclose(conversation.logprob[conversation.mask], [-0.1, -0.2, -0.3, -0.4])
    assert not conversation.logprob[~conversation.mask].any()

    tokens, mask = conversation.tokens[None], conversation.mask[None]
    batch = TokenBatch.from_rows(tokens, mask, reward=[1.0])
    weights = jax.random.normal(jax.random.key(0), (11, 40))

    def loss(logits):
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[0][:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(batch.mask[0], logprob, 0.0))

    gradient = jax.grad(loss)(weights)
    assert (np.abs(gradient).sum(1) > 0).tolist() == conversation.mask.tolist()


def test_t06_headers_of_the_template_are_not_trained(chatml):
    user = [{"role": "user", "content": "hi"}]
    sampled = [*chatml.encode("It is 7."), chatml.eos_ids[0]]
    conversation = Conversation.start(chatml.chat(user)).append_sampled(sampled, np.zeros(len(sampled)), 0)
    before = len(conversation)
    conversation = conversation.append_turns(chatml, [{"role": "user", "content": "And 5 + 5?"}])
    assert not conversation.mask[before:].any()
    # The sampled end of turn is not repeated, and the ids equal those of one rendering of everything.
    whole = [*user, {"role": "assistant", "content": "It is 7."}, {"role": "user", "content": "And 5 + 5?"}]
    assert conversation.tokens.tolist() == chatml.chat(whole)


def test_t01_an_end_of_turn_with_a_blank_before_it_is_not_repeated(with_bos):
    """The template of Llama 2 writes " </s>" after an answer; the policy wrote the </s> alone."""
    template = (
        "{% for m in messages %}{{ bos_token if m.role == 'user' else ' ' }}{{ m.content }}"
        "{{ '' if m.role == 'user' else ' ' + eos_token }}{% endfor %}"
    )
    tokenizer = with_bos(template)
    start = Conversation.start(tokenizer.chat([{"role": "user", "content": "hi"}]))
    sampled = [*tokenizer.encode("yes"), tokenizer.eos_ids[0]]
    after = start.append_sampled(sampled, np.zeros(len(sampled)), 0).append_turns(
        tokenizer, [{"role": "user", "content": "go"}]
    )
    assert tokenizer.decode(after.tokens, False) == "<|endoftext|>hiyes<|im_end|><|endoftext|>go"
    cut = start.append_sampled(sampled[:-1], np.zeros(len(sampled) - 1), 0).append_turns(
        tokenizer, [{"role": "user", "content": "go"}]
    )
    assert tokenizer.decode(cut.tokens, False) == "<|endoftext|>hiyes <|im_end|><|endoftext|>go"
    assert not cut.mask[-1] and cut.mask.sum() == len(sampled) - 1


def test_t05_a_template_that_forgets_thoughts_changes_no_sampled_token(backend_json):
    """Rendering the history again would drop <think>…</think> of earlier turns; every row is what the sampler saw."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = Tokenizer(backend_json, special={"eos_token": "<|im_end|>"}, chat_template=template)
    user = [{"role": "user", "content": "A?"}]
    first = tokenizer.chat(user)
    thought = [*tokenizer.encode("<think>x</think>A", allow_special=True), tokenizer.eos_ids[0]]
    one = Conversation.start(first).append_sampled(thought, np.zeros(len(thought)), 0)
    two = one.append_turns(tokenizer, [{"role": "user", "content": "B"}])
    second = two.tokens.tolist()  # the prompt of the next turn, as the sampler gets it
    assert second[: len(one)] == first + thought
    again = [*user, {"role": "assistant", "content": "<think>x</think>A"}, {"role": "user", "content": "B"}]
    assert second != tokenizer.chat(again)
    both = two.append_sampled([7, tokenizer.eos_ids[0]], np.zeros(2), 1)
    # Every trained token follows exactly the ids that it was sampled after, and is trained once.
    seen = {0: (first, thought), 1: (second, [7, tokenizer.eos_ids[0]])}
    for version, (prompt, sampled) in seen.items():
        at = np.flatnonzero(both.version == version)
        assert both.tokens[at].tolist() == sampled and both.tokens[: at[0]].tolist() == prompt
    assert both.mask.sum() == len(thought) + 2


def test_sampled_ids_are_never_encoded_again(chatml):
    """An unusual cut of the same text stays as sampled when the next turn is added."""
    of_byte = {chatml.token_bytes(i): i for i in range(3, 259)}
    sampled = [of_byte[bytes([b])] for b in b"It is"]
    assert sampled != chatml.encode("It is")
    conversation = Conversation.start(chatml.chat([{"role": "user", "content": "hi"}]))
    start = len(conversation)
    conversation = conversation.append_sampled(sampled, np.zeros(5), 0)
    conversation = conversation.append_turns(chatml, [{"role": "user", "content": "go on<|im_end|>"}])
    assert conversation.tokens[start : start + 5].tolist() == sampled
    assert conversation.tokens[start + 5] == chatml.eos_ids[0] and not conversation.mask[start + 5]
    assert chatml.decode(conversation.tokens[start + 5 :], False) == (
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_of_tools_cannot_end_a_turn(chatml):
    conversation = Conversation.start([1]).append_text(chatml, "42<|im_end|>")
    assert not any(chatml.is_special(i) for i in conversation.tokens[1:]) and not conversation.mask.any()


@pytest.mark.parametrize("limit", range(9))
def test_t11_a_cut_invents_no_stop_id(limit):
    eos = 2
    conversation = Conversation.start([5, 6]).append_sampled([7, 8, 9, 10, 11, 12], -np.arange(6.0), 1)
    cut = conversation.truncate(limit)
    assert len(cut) == len(cut.mask) == len(cut.logprob) == limit
    assert cut.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12][:limit] and eos not in cut.tokens
    assert _mask(cut) == [0, 0, 1, 1, 1, 1, 1, 1][:limit]


def test_trajectory_carries_every_token(chatml):
    conversation = Conversation.start([5, 6]).append_sampled([7, 2], [-0.5, -0.25], 4)
    prompt = Prompt(uid="p", tokens=np.asarray([5, 6], np.int32))
    record = conversation.trajectory(prompt=prompt, group=0, reward=1.0, stop=StopReason.EOS)
    assert record.completion.tolist() == [7, 2] and record.version.tolist() == [-1, -1, 4, 4]
    assert (
        record.tokens.dtype == np.int32 and record.logprob.dtype == np.float32 and record.mask.dtype == bool
    )


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        Conversation.start([1]).append_sampled([1, 2], [0.0], 0)
    with pytest.raises(ValueError, match="must not be negative"):
        Conversation.start([1]).truncate(-1)
    with pytest.raises(ValueError, match="one shape"):
        Conversation(
            tokens=np.zeros(2, np.int32),
            mask=np.zeros(1, bool),
            logprob=np.zeros(2),
            version=np.zeros(2),
            kv_version=np.zeros(2),
        )


def test_supports_stay_with_their_tokens_over_turns():
    first = Conversation.start([1, 2]).append_sampled(
        [7, 8], [0.0, 0.0], 0, support_ids=np.array([[7, -1], [3, 8]])
    )
    then = (
        first.append_given([4])
        .append_sampled([5], [0.0], 0)
        .append_sampled([6], [0.0], 1, support_ids=np.array([[9, 6, 1]]))
    )
    none = [-1, -1, -1]
    want = [none, none, [7, -1, -1], [3, 8, -1], none, none, [9, 6, 1]]
    assert then.support_ids.tolist() == want and then.support_ids.dtype == np.int32
    assert then.truncate(4).support_ids.tolist() == want[:4]
    prompt = Prompt(uid="u", tokens=np.array([1, 2], np.int32))
    assert then.trajectory(prompt=prompt, group=0, reward=None).support_ids.tolist() == want
    assert Conversation.start([1]).append_sampled([2], [0.0], 0).support_ids is None
    with pytest.raises(ValueError, match=r"\[N, K\] for 2 tokens, got the shape \(1, 2\)"):
        first.append_sampled([7, 8], [0.0, 0.0], 0, support_ids=np.array([[7, -1]]))
