"""The autoscaler's rule: how many replicas a pool needs, from what its engines report. Pure: values in, decision out.

Reading order:

* `rule` is the story: one review of one pool;
* `decision` has its input and output, `memory` what one review leaves for the next;
* `prediction` computes latencies of a number of replicas, from `demand` and `step_curve`;
* `evidence` judges what the present replicas were measured to do;
* `pair_review` is the review of a prefill and a decode pool together: `pair_sizes` chooses their sizes where not both
  can have what they need, `moved_work` computes what one does for the other, and `role_flip` lets a replica change its
  role before another is started;
* `load_report` reads an engine's counters, `load_window` turns a history of them into demand, curve and measured times.

The loop's `LoadWatch` feeds it each 5 s; the clocked simulation feeds it the same way in virtual time.
"""
