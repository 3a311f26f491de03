"""The reward of the quickstart, as any reward file is written: 1 for the right sum, 0 for anything else.

--reward.remote_url takes the path of such a file.
"""

END = "<|end|>"


def reward_func(queries, prompts, labels):
    """Compares the answer of each query, which is prompt and response with special tokens, with its label."""
    rewards, ended = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query.removeprefix(prompt)
        rewards.append(float(response == f"{label}{END}"))
        ended.append(float(response.endswith(END)))
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"ended": ended}}
