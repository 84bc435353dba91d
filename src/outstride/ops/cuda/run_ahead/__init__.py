"""Run-ahead: passes that are launched before the engine asks for them.

While a pass runs, the host is idle; while the host decides and plans, the GPU would be. So the pass
that will most likely follow is launched right after the one that was asked for. Two kinds can be known:

- `decode_steps`, `next_step`: one more step of sequences that are decoded token by token. It is known
  but for its input tokens, and those are on the GPU already.
- `draft_ahead`, `realign`: where a draft head drafts one chain, its next pass and the target's pass
  over what it will draft. They are known but for one number: how many tokens of the chain are accepted.
  The GPU finds that number itself. Both passes are described as if all were accepted, and `realign`
  moves their metadata back before they begin.

`controller.RunAhead` decides. Its states, and what changes them:

    +------+  decode steps were launched,     +-------------+
    |      |  and hits are likely (1)         | step ahead  |
    |      | -------------------------------> | (one pass)  | --+  the engine asks for it, or for
    |      | <------------------------------- |             | <-+  some of its rows: return the
    |      |  anything else is asked for      +-------------+      reply, launch the next one
    | idle |
    |      |  a pass over a drafted chain     +-------------+
    |      |  was launched, hits likely (1)   | draft ahead |      the engine asks for the draft:
    |      | -------------------------------> | (two passes)| --+  return the reply; then for the
    |      | <------------------------------- |             | <-+  pass over it: return the reply,
    +------+  anything else is asked for      +-------------+      launch the next two

    (1) `HitRate`: the engine asked for most of the passes that could have been known lately.
    "Anything else" is any other pass, a copy of KV, and new weights or buffers.

What is under way is for the very next request alone: any other pass ends it. The engine's `StepToken`
says whether a request is that one. A sequence's next step must have the token of the last one plus the
tokens that were settled (`StepToken.on`): its KV is then where it was, in order, and nothing else
happened to its block table. Besides that, `match` compares what the token does not name: the settled
tokens themselves, the slots of the new KV, and what is asked of the LM head.

A pass that the engine does not ask for does no harm, and its results are dropped. It wrote KV only
past the end of what its sequences hold, into pages that they alone may write, or into staging pages
that belong to no sequence, from which KV is copied once its owner is known. KV past the end of a
sequence is never read: the next pass of the sequence writes it anew. What is computed past the end of
a text (a stop token that the host has not seen yet) is dropped in the same way.
"""
