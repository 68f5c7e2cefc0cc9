from dataclasses import replace
from tests.engines.sglang.test_sglang import engine, running
from tests.engines.contract.answers import *
from tests.engines.contract.answers import penalized
class TestGeneration: pass
import pytest
@pytest.mark.engines
def test_dbg(engine, trainer):
    for lens in ([3], [3,1,9,14]):
      for temp in (0.0, 0.9):
        prompts, mask = ragged(engine, lens)
        s = replace(GREEDY, temperature=temp, ignore_eos=True, presence_penalty=0.6, frequency_penalty=0.3, max_new_tokens=10)
        g = engine.generate(prompts, mask, names(len(lens)), s, KEY)
        for ids, att, resp, lp in zip(prompts, mask, rows(g), g.log_probs):
            p = ids[att].tolist()
            L = logits_of(trainer.model, p, resp)
            for name, lag in (("exact", 0), ("lag1", 1)):
                print(lens, temp, name, [round(float(lp[t] - (penalized(l, s, p, resp[:max(t-lag,0)])/(temp or 1.)).log_softmax(-1)[resp[t]]),4) for t,l in enumerate(L)], resp)
