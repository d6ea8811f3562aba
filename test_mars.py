"""The method, one sentence a test. Tiny random models, float32, CPU, no downloads: `python -m pytest -q`."""

import argparse
import copy
import contextlib
import functools
import gzip
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import datasets
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import eval as evaluation
import mars

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are so small that a second thread only waits

B, V, MASK, ENDS = 4, 61, 60, {1, 13}


SLIDING = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
KINDS = {  # what is special about the kinds of models that are tried
    "qwen2": {}, "llama": {}, "qwen2 sliding": SLIDING | dict(use_sliding_window=True), "qwen3": dict(tie_word_embeddings=False), "mistral": dict(sliding_window=7),
    "gemma": dict(head_dim=8), "gemma3_text": SLIDING | dict(head_dim=8, final_logit_softcapping=3.0),
    "phi": dict(resid_pdrop=0.1), "smollm3": {}, "gpt_neox": {}, "cohere": dict(logit_scale=0.3), "granite": dict(logits_scaling=3.0),
    "phi3": {},
}  # fmt: skip


@functools.cache
def tiny(kind="qwen2", **options):
    """A random model with weights so large that it is sure of some tokens and unsure of others."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.5, tie_word_embeddings=True)
    sizes |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind.split()[0], **sizes | KINDS.get(kind, {}) | options)).eval()
    model.config.mars_block_size, model.config.mars_mask_token_id = B, MASK
    model.generation_config = transformers.GenerationConfig(eos_token_id=sorted(ENDS), pad_token_id=0, suppress_tokens=[MASK])
    return model


def prompts(n, longest=23, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, MASK) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def examples(n, seed=0):
    rng, texts = random.Random(seed), prompts(2 * n, seed=seed)
    return [(p, r, rng.randrange(B)) for p, r in zip(texts[::2], texts[1::2])]


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def test_attention_mask_is_the_one_that_is_drawn():
    """The drawing in the docstring is what the code computes."""
    rows = [re.findall("[■·]", line) for line in mars.attention_mask.__doc__.split("\n")]
    drawn = torch.tensor([[cell == "■" for cell in row] for row in rows if row])
    assert drawn.shape == (10, 10)
    assert torch.equal(mars.attention_mask(2, 5, 3), drawn)


@pytest.mark.parametrize("phase", range(3))
@pytest.mark.parametrize("full_block", [False, True])
def test_a_mask_sees_the_clean_text_before_its_block_and_its_own_block(phase, full_block):
    """Eq. 2, written out pair by pair."""
    P, R, block = 3, 8, 3
    index, start = mars.noisy_stream(R, block, phase, full_block)
    assert index.tolist() == [i for i in range(R - 1) if full_block or i - max(0, (i + phase) // block * block - phase) < block - 1]
    tokens = [("clean", p, None) for p in range(P + R)] + [("mask", P + i, (i + phase) // block) for i in index.tolist()]

    def sees(query, key):
        if key[0] == "clean":
            return key[1] <= query[1] if query[0] == "clean" else key[1] < P + max(0, query[2] * block - phase)
        return query[0] == "mask" and query[2] == key[2] and key[1] <= query[1]

    expected = [[sees(q, k) for k in tokens] for q in tokens]
    assert mars.attention_mask(P, R, block, phase, full_block).tolist() == expected


def test_a_hand_worked_row():
    """The mask at index i stands at position P+i and predicts x_{i+1}; clean position p predicts token p+1."""
    rows = mars.collate([([7, 8], [11, 12, 13, 14, 15], 0), ([9], [21, 22], 1)], 3, MASK)
    _, M = mars.IGNORE, MASK
    # columns           p   p  x0  x1  x2  x3  x4  M0  M1  M3      p  x0  x1  M0  padding
    expected = {
        "ids":       [[7,  8, 11, 12, 13, 14, 15,  M,  M,  M], [9, 21, 22,  M, M, M, M, M, M, M]],
        "positions": [[0,  1,  2,  3,  4,  5,  6,  2,  3,  5], [0,  1,  2,  1, 0, 0, 0, 0, 0, 0]],
        "labels":    [[_, 11, 12, 13, 14, 15,  _, 12, 13, 15], [21, 22, _, 22, _, _, _, _, _, _]],
        "offsets":   [[0,  0,  0,  0,  0,  0,  0,  1,  2,  1], [0,  0,  0,  1, 0, 0, 0, 0, 0, 0]],
    }  # fmt: skip
    for name, values in expected.items():
        assert rows[name].tolist() == values
    assert torch.equal(rows["visible"][0, 0], mars.attention_mask(2, 5, 3, 0))
    assert torch.equal(rows["visible"][1, 0, :4, :4], mars.attention_mask(1, 2, 3, 1))
    assert torch.equal(rows["visible"][1, 0, 4:], torch.eye(10).bool()[4:]), "padding sees itself"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_the_decoder_runs(kind):
    """Mask m of block k predicts what a causal model does at the end of prompt + x[:s_k] + m+1 masks."""
    model, batch = tiny(kind), examples(6)
    rows = mars.collate(batch, B, MASK)
    with torch.no_grad():
        mask = mars.by_layer(model, rows["visible"], rows["positions"], rows["positions"])
        logits = model(input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=mask).logits
        for row, (prompt, response, phase) in zip(logits, batch):
            C = len(prompt) + len(response)
            plain = model(torch.tensor([prompt + response])).logits[0]
            torch.testing.assert_close(row[:C], plain, atol=1e-4, rtol=1e-5)
            assert torch.equal(row[:C].argmax(-1), plain.argmax(-1))
            index, start = (t.tolist() for t in mars.noisy_stream(len(response), B, phase))
            for noisy, i, s in zip(row[C:], index, start):
                text = prompt + response[:s] + [MASK] * (i - s + 1)
                decoded = model(torch.tensor([text])).logits[0, -1]
                torch.testing.assert_close(noisy, decoded, atol=1e-4, rtol=1e-5)
                assert noisy.argmax() == decoded.argmax()


@pytest.mark.parametrize("block_size, ar_weight, full_block", [(1, 1.0, False), (B, 1.0, False), (B, 0.0, False), (B, 0.5, True)])
def test_the_loss_is_the_sum_of_two_means(block_size, ar_weight, full_block):
    """L = L_mask + ar_weight · L_AR, each a mean over its supervised tokens, one forward pass per token (Eq. 5)."""
    model, ar, masked = tiny(), [], []
    batch = [(prompt, response, phase % block_size) for prompt, response, phase in examples(4)]
    with torch.no_grad():
        for prompt, response, phase in batch:
            predict = lambda ids, label: F.cross_entropy(model(torch.tensor([ids])).logits[0, -1:], torch.tensor([label])).item()
            ar += [predict(prompt + response[:i], x) for i, x in enumerate(response)]
            for index, start in zip(*(t.tolist() for t in mars.noisy_stream(len(response), block_size, phase, full_block))):
                masked.append(predict(prompt + response[:start] + [MASK] * (index - start + 1), response[index + 1]))
        loss, parts = mars.mars_loss(model, batch, block_size, MASK, ar_weight, full_block)
    assert (len(ar), len(masked)) == mars.count_targets(batch, block_size, full_block)
    expected = ar_weight * sum(ar) / len(ar) + (sum(masked) / len(masked) if masked else 0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert parts["nll"][0].item() == pytest.approx(sum(ar), rel=1e-5)
    assert parts["count"].sum() == len(ar) + len(masked)


def gradient(model, batches, totals=None):
    model.zero_grad()
    for batch in batches:
        mars.mars_loss(model, batch, B, MASK, totals=totals)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_gradients_do_not_depend_on_how_a_step_is_split(monkeypatch):
    """Micro-batches of unequal rows, and logits in chunks, add up to the gradient of the whole."""
    model, batch = tiny(), examples(8)
    whole = gradient(model, [batch])
    totals = mars.count_targets(batch, B)
    torch.testing.assert_close(gradient(model, [batch[:3], batch[3:]], totals), whole, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(gradient(model, [batch[:3], batch[3:]]) / 2, whole, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(mars, "CHUNK", 5 * V)
    torch.testing.assert_close(gradient(model, [batch]), whole, atol=1e-4, rtol=1e-4)


def test_the_vocabulary_is_projected_to_in_chunks(monkeypatch):
    """With 150,000 ids a training step takes less than a third of the memory that projecting everything at once takes."""
    sizes = dict(vocab_size=150_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    model, used, gradients = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)), [], []
    for chunk in (mars.CHUNK, 2**40):
        monkeypatch.setattr(mars, "CHUNK", chunk)
        before = mars.peak_memory(model.device, reset=True)
        mars.mars_loss(model, [([5] * 8, [6] * 256, 0)] * 2, B, 7)[0].backward()
        used.append(mars.peak_memory(model.device) - before)
        gradients.append(model.get_input_embeddings().weight.grad)
        model.zero_grad()
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    assert math.isnan(used[0]) or used[1] > 3 * used[0] > 300, used


def test_every_alignment_of_blocks_is_practised():
    """Order and phase follow from (seed, visit, example) alone, and phases take every value."""
    data = [([i], [i]) for i in range(100)]
    take = lambda seed, fixed=False: [next(it) for it in [mars.visits(data, B, fixed, seed)] for _ in range(200)]
    assert take(0) == take(0) != take(1)
    assert {phase for *_, phase in take(0)} == set(range(B)) and {phase for *_, phase in take(0, True)} == {0}
    assert sorted(p for p, *_ in take(0)[:100]) == [[i] for i in range(100)]
    assert take(0)[:100] != take(0)[100:]


def test_training_learns():
    """A few steps on one batch make both losses fall, and the report counts each mask offset apart."""
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(tiny().config)
    data = [(p, r) for p, r, _ in examples(4)]
    reports = list(mars.train(mars.Training(model, 30, 5e-3), data, block_size=B, mask_id=MASK, batch_size=2, accumulate=2))
    first, last = (report["nll"] / report["count"].clamp(min=1) for report in (reports[0], reports[-1]))
    assert (last[:B] < 0.7 * first[:B]).all() and last[B] == 0
    assert not model.training


def test_dropout_differs_from_step_to_step():
    """Random numbers are a function of the step, and are new at each."""
    training = mars.Training(copy.deepcopy(tiny("phi")), 4, 0.0)
    reports = mars.train(training, [([5, 6], [7, 8, 9, 10])] * 2, block_size=B, mask_id=MASK, batch_size=2, fixed_phase=True)
    assert len({float(report["nll"].sum()) for report in reports}) == 4


def five_steps(block_size=B, batch_size=8, accumulate=1, shard=False, **options):
    """The gradient of the first step, with its norm before it was clipped, and the losses of five, on rows of very unequal length."""
    model = copy.deepcopy(tiny())
    data = [(prompt * (1 + 5 * (i % 3)), response * (1 + i % 4)) for i, (prompt, response, _) in enumerate(examples(20))]
    training, gradients = mars.Training(model, 5, 1e-2, shard), []
    whole = lambda x: x.full_tensor() if shard else x
    hook = lambda *_: gradients.append(torch.cat([whole(p.grad).flatten() for p in training.loss.parameters()]))
    training.optimizer.register_step_pre_hook(hook)
    reports = list(mars.train(training, data, block_size=block_size, mask_id=MASK, batch_size=batch_size, accumulate=accumulate, **options))
    losses = torch.stack([report["nll"] / report["count"].clamp(min=1) for report in reports])
    return gradients[0] * reports[0]["grad_norm"], losses


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory, checkpoint):
    """What `worker` at the end of this file has found."""
    folder = tmp_path_factory.mktemp("two")
    train_chats(checkpoint, folder, "--batch-size 4 --out {tmp}/one")
    train_chats(checkpoint, folder, "--batch-size 4 --max-steps 20 --out {tmp}/whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__, str(folder), checkpoint]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


WAYS = {"two micro-batches": (4, 2), "eight micro-batches": (1, 8)}
WAYS_OF_TWO = {"two processes": (4, 1, False), "two processes, micro-batches": (2, 2, False), "sharded": (4, 1, True), "sharded, micro-batches": (2, 2, True)}


@pytest.mark.parametrize("way", [*WAYS, *WAYS_OF_TWO])
@pytest.mark.parametrize("block_size", [1, B])
def test_the_same_gradient_however_a_step_is_split(way, block_size, in_two_processes):
    """One batch of 8, micro-batches, processes, shards: the same gradient to 1e-5 of its norm, and the same losses over five steps to 1e-4."""
    gradient, losses = five_steps(block_size)
    if way in WAYS:
        split_gradient, split_losses = five_steps(block_size, *WAYS[way])
    else:
        split_gradient, split_losses = torch.load(in_two_processes / f"{way}-{block_size}.pt")
    torch.testing.assert_close(split_gradient, gradient, atol=1e-5 * gradient.norm(), rtol=0)
    torch.testing.assert_close(split_losses, losses, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(losses[0], losses[-1], rtol=0.1)


def test_two_processes_write_the_checkpoint_of_one(in_two_processes):
    """`torchrun mars.py train`, sharded or not, leaves a plain folder with the weights that one process trains."""
    one = AutoModelForCausalLM.from_pretrained(in_two_processes / "one/mars")
    for name in ("copies", "shards"):
        two, _ = mars.load(str(in_two_processes / name / "mars"), "cpu")
        assert two.config.mars_block_size == B
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_run_may_be_resumed_by_another_number_of_processes(in_two_processes, checkpoint):
    """Two processes with a share of the state each leave after 10 steps what one can go on with."""
    train_chats(checkpoint, in_two_processes, "--batch-size 4 --max-steps 20 --save-every 10 --resume --out {tmp}/half")
    whole, half = (AutoModelForCausalLM.from_pretrained(in_two_processes / name / "mars").parameters() for name in ("whole", "half"))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(whole, half, strict=True))


def train_chats(model, tmp_path, options, steps="--max-steps 10"):
    """The train command on 30 toy problems, some of them much longer; by default ten steps of stage mars."""
    if not (data := tmp_path / "chats.jsonl").exists():
        rows = [{"question": row["question"] * (1 + i % 3), "answer": row["answer"]} for i, row in enumerate(mars.toy_rows("train", 30))]
        data.write_text("\n".join(map(json.dumps, rows)))
    options = f"--data {data} --stage mars {steps} --batch-size 2 --lr 1e-3 " + options.format(tmp=tmp_path)
    mars.main(["train", "--model", model, *options.split()])


def state_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "training.json"}


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A checkpoint that draws random numbers when it is trained."""
    folder = tmp_path_factory.mktemp("phi")
    _, tokenizer = mars.toy_model()
    mars.save(tiny("phi", vocab_size=len(tokenizer), resid_pdrop=0.2, initializer_range=0.02), tokenizer, folder, 1, tokenizer.mask_token_id)
    return str(folder)


def test_an_interrupted_run_that_is_resumed_equals_one_that_was_not(dropping, tmp_path, monkeypatch, capsys):
    """Weights, optimiser, schedule, data order and random numbers continue exactly: after a crash, and after Ctrl-C."""
    options = "--max-steps 20 --save-every 5 --stage both --out {tmp}/"
    train_chats(dropping, tmp_path, options + "whole")
    write, describe, signals = mars.write_checkpoint, mars.describe, iter((signal.SIGINT, signal.SIGTERM))

    def interrupted(training, tokenizer, folder, *rest):
        write(training, tokenizer, folder, *rest)
        if (folder.name, training.step) == ("mars.partial", 10):
            raise RuntimeError("power cut")

    def impatient(reports, seconds):
        if reports[-1]["step"] == 12:
            signal.raise_signal(next(signals))
        return describe(reports, seconds)

    def refused(options, complaint, status=2):
        with pytest.raises(SystemExit) as stop:
            train_chats(dropping, tmp_path, options)
        assert complaint in capsys.readouterr().err and stop.value.code == status

    monkeypatch.setattr(mars, "write_checkpoint", interrupted)
    with pytest.raises(RuntimeError, match="power cut"):
        train_chats(dropping, tmp_path, options + "parts")
    monkeypatch.undo()
    refused(options + "parts", "--resume")
    refused(options + "parts --resume --lr 0.5", "trained with lr 0.001, not 0.5")
    data = tmp_path / "chats.jsonl"
    rows = data.read_text()
    data.write_text(rows.replace("figs", "eggs"))
    refused(options + "parts --resume", "trained with data 30 examples")
    data.write_text(rows)
    train_chats(dropping, tmp_path, options + "parts --resume")
    assert "ar: finished before" in capsys.readouterr().out
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody has caught it"))
    monkeypatch.setattr(mars, "describe", impatient)
    for stage in ("ar", "mars"):
        refused(options + "stopped --resume", "stopped after step 12", 130)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"stopped/{stage}.partial")
    signal.signal(signal.SIGTERM, before)
    monkeypatch.undo()
    train_chats(dropping, tmp_path, options + "stopped --resume")
    for out, stage in itertools.product(("parts", "stopped"), ("ar", "mars")):
        assert state_of(tmp_path / out / stage) == state_of(tmp_path / "whole" / stage)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["ar", "mars"]
    weights = [mars.load(str(tmp_path / "whole" / stage))[0].parameters() for stage in ("ar", "mars")]
    assert not any(torch.equal(a, b) for a, b in zip(*weights) if a.ndim > 1)


def test_a_stop_that_comes_with_the_last_checkpoint_is_not_lost(dropping, tmp_path, monkeypatch, capsys):
    """It does not begin the next stage, and --resume finishes the stage."""
    write = mars.write_checkpoint
    stop = lambda training, *rest: (write(training, *rest), training.step == 10 and signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(mars, "write_checkpoint", stop)
    with pytest.raises(SystemExit):
        train_chats(dropping, tmp_path, "--save-every 5 --out {tmp}/out")
    assert "stopped after step 10" in capsys.readouterr().err and (tmp_path / "out/mars.partial").exists()
    monkeypatch.undo()
    train_chats(dropping, tmp_path, "--out {tmp}/out --resume")
    assert mars.load(str(tmp_path / "out/mars"), "cpu") and not (tmp_path / "out/mars.partial").exists()


def test_a_gradient_that_is_not_finite_ends_training(dropping, tmp_path, capsys):
    """One line says so, and what is on disk is finite."""
    with pytest.raises(SystemExit) as stop:
        train_chats(dropping, tmp_path, "--save-every 1 --lr 1e30 --out {tmp}/out")
    assert stop.value.code == 2 and "lower --lr" in capsys.readouterr().err
    left = [AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out").iterdir()]
    assert all(weight.isfinite().all() for model in left for weight in model.parameters())


def test_the_first_step_trains_and_epochs_count_examples(dropping, tmp_path, capsys):
    """Warm-up ends within 3 % of the steps and never begins at 0; 30 examples, 4 a step, 2 epochs: 15 steps."""
    assert mars.Training(tiny(), 1, 1.0).schedule.get_last_lr() == [1.0]
    training = mars.Training(tiny(), 100, 1.0)
    assert training.schedule.get_last_lr() == [pytest.approx(1 / 3)]
    train_chats(dropping, tmp_path, "--batch-size 4 --epochs 2 --stage ar --out {tmp}/out", steps="")
    assert "ar: steps 1 to 15 of 4 examples" in capsys.readouterr().out


def test_with_gradient_checkpointing_layers_run_again_in_the_backward_pass(dropping, tmp_path, monkeypatch):
    """They keep little, and what comes out is the same, dropout included."""
    layer, calls, counts = transformers.models.phi.modeling_phi.PhiMLP, [], []
    forward = layer.forward
    count = lambda self, x: calls.append(torch.is_grad_enabled() and self.training) or forward(self, x)
    monkeypatch.setattr(layer, "forward", count)
    for option in ("", "--gradient-checkpointing"):
        calls.clear()
        train_chats(dropping, tmp_path, f"--max-steps 2 --out {{tmp}}/out{option} {option}")
        counts.append(sum(calls))
    assert counts[1] == 2 * counts[0] > 0
    assert state_of(tmp_path / "out/mars") == state_of(tmp_path / "out--gradient-checkpointing/mars")


def test_a_stage_is_not_taken_for_one_that_began_elsewhere(dropping, checkpoint, tmp_path, capsys):
    """MARS from the model itself is not MARS from its AR fine-tuning; another model does not overwrite OUT/STAGE."""
    train_chats(dropping, tmp_path, "--max-steps 2 --out {tmp}/out")
    for model, more, complaint in ((dropping, "--stage both --resume", "was trained with model"), (checkpoint, "", "--out")):
        with pytest.raises(SystemExit):
            train_chats(model, tmp_path, f"--max-steps 2 {more} --out {{tmp}}/out")
        assert complaint in capsys.readouterr().err


def whole_checkpoints(out, stage="mars"):
    """The folders that --resume may continue from."""
    names = (stage, f"{stage}.partial", f"{stage}.partial.old")
    return [out / name for name in names if (out / name / "training.json").exists()]


def test_whenever_it_is_killed_it_can_be_resumed(dropping, tmp_path):
    """SIGKILL at 20 random moments, also while it writes: the end is that of an undisturbed run."""
    options, killed = "--max-steps 40 --save-every 1 --out {tmp}/", tmp_path / "killed"
    train_chats(dropping, tmp_path, options + "whole")
    context, rng, kills, left, ended = multiprocessing.get_context("forkserver"), random.Random(0), 0, set(), False
    context.set_forkserver_preload(["test_mars"])
    changed = lambda: [path.stat().st_mtime_ns for path in killed.glob("mars.partial/training.pt")]
    while kills < 20 or not ended:
        if ended:  # so soon? then the same again
            shutil.rmtree(killed)
        before = changed()
        child = context.Process(target=train_chats, args=(dropping, tmp_path, options + "killed --resume"))
        child.start()
        while child.is_alive() and changed() == before:
            time.sleep(0.001)  # until it has written something
        child.join(rng.uniform(0, 0.1) if kills < 20 else None)
        child.kill()
        child.join()
        left |= {path.name for path in killed.iterdir()}
        assert AutoModelForCausalLM.from_pretrained(whole_checkpoints(killed)[0])
        ended = child.exitcode == 0
        if ended:
            assert state_of(killed / "mars") == state_of(tmp_path / "whole/mars")
        else:
            assert child.exitcode == -signal.SIGKILL
            kills += 1
    assert any(name.endswith((".new", ".old")) for name in left), "some should die while they write"


@pytest.mark.parametrize("where", [(mars, "save"), (torch, "save"), (Path, "rename"), (shutil, "rmtree")])
@pytest.mark.parametrize("call", range(4))
def test_dying_while_it_writes_leaves_a_whole_checkpoint(where, call, dropping, tmp_path):
    """At whatever point of writing the second checkpoint it dies, one is whole, and --resume continues from it."""
    options, (place, name), calls = "--max-steps 6 --save-every 2 --out {tmp}/", where, iter(range(99))
    train_chats(dropping, tmp_path, options + "whole")

    class Killed(BaseException):
        """As SIGKILL: nobody may catch it."""

    def dying(*args, **kw):
        if (tmp_path / "out/mars.partial").exists() and next(calls) >= call:
            raise Killed
        return done(*args, **kw)

    done = getattr(place, name)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(place, name, dying)
        train_chats(dropping, tmp_path, options + "out")
    for folder in whole_checkpoints(tmp_path / "out"):
        assert AutoModelForCausalLM.from_pretrained(folder)
    train_chats(dropping, tmp_path, options + "out --resume")
    assert state_of(tmp_path / "out/mars") == state_of(tmp_path / "whole/mars")


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(dropping, tmp_path, capsys):
    """What could not be written whole is not there, and what was there still is."""
    options = "--max-steps 4 --save-every 2 --out {tmp}/out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, last in ((10_000, "no earlier"), (60_000, "no earlier"), (limits[0], "--resume continues from")):
        with pytest.MonkeyPatch.context() as patch:
            if room == limits[0]:
                write = torch.save
                full = lambda rest, file: write(rest, file if rest["step"] == 2 else "/dev/full")
                patch.setattr(torch, "save", full)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            with pytest.raises(SystemExit) as stop:
                train_chats(dropping, tmp_path, options)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and "error: cannot write" in error and last in error and error.count("\n") == 1
        assert [path.name for path in (tmp_path / "out").glob("*")] == ["mars.partial"] * (room == limits[0])
    train_chats(dropping, tmp_path, options + " --resume")
    assert mars.load(str(tmp_path / "out/mars"))


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------


def check(model, texts, outs, threshold, max_new_tokens, block_size=B):
    """Every row is what the naive decoder makes of it alone, pass by pass."""
    for i, (prompt, out) in enumerate(zip(texts, outs)):
        tau = threshold[i] if isinstance(threshold, list) else threshold
        assert out == mars.naive_generate(model, prompt, max_new_tokens, tau, block_size), i
        assert sum(out.steps) == len(out.tokens) and MASK not in out.tokens and not ENDS & {*out.tokens[:-1]}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_fast_decoder_is_the_naive_one(kind, batch_size):
    """Cached equals uncached and a row in a batch equals the row alone: unequal prompts, acceptance, ends."""
    model, texts = tiny(kind), prompts(12)
    seen = set()
    for threshold in (1.0, 0.9, 0.5, 0.2):
        outs = mars.generate(model, texts, 70, threshold, batch_size=batch_size)
        check(model, texts, outs, threshold, 70)
        seen |= {out.stop for out in outs} | {n for out in outs for n in out.steps}
    assert seen == {"eos", "length", 1, 2, 3, 4}, "ends and acceptance should vary"


@pytest.mark.parametrize("kind", KINDS)
def test_every_usual_kind_of_model_is_trained_and_decoded(kind):
    """After a training step: τ = 1 is Hugging Face's greedy output, cached equals uncached, and lossless equals AR."""
    model, texts = copy.deepcopy(tiny(kind)), prompts(8, seed=2)
    mars.check_model(model)
    before = copy.deepcopy(model)
    data = [(p, r) for p, r, _ in examples(4)]
    *_, report = mars.train(mars.Training(model, 1, 1e-3), data, block_size=B, mask_id=MASK, batch_size=4)
    assert 0 < report["grad_norm"] < math.inf
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))
    greedy = mars.hf_generate(model, texts, 40, 1)
    assert mars.generate(model, texts, 40, 1.0, batch_size=5) == greedy and len({tuple(out.tokens) for out in greedy}) > 4
    lengths = set()
    for threshold in (0.3, 0.1, 0.03):  # soft caps and scales make a model less sure
        outs = mars.generate(model, texts, 40, threshold, batch_size=5)
        check(model, texts, outs, threshold, 40)
        lengths |= {n for out in outs for n in out.steps}
    assert {1, B} <= lengths
    assert [out.tokens for out in mars.generate(model, texts, 40, lossless=True, batch_size=5)] == [out.tokens for out in greedy]


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_smaller_block_than_was_trained(block_size):
    """A checkpoint decodes with any block size up to its own."""
    outs = mars.generate(tiny(), prompts(4), 20, 0.3, block_size=block_size)
    check(tiny(), prompts(4), outs, 0.3, 20, block_size)
    assert max(n for out in outs for n in out.steps) == block_size


@pytest.mark.parametrize("batch_size", [1, 8])
def test_threshold_one_is_autoregressive_decoding(batch_size, tmp_path):
    """At τ = 1 the output is Hugging Face's greedy output, also of the saved checkpoint in plain AutoModelForCausalLM."""
    model, tokenizer = mars.toy_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 8 if weight.ndim > 1 else 1  # else an untrained model says one token again and again
    mars.save(model, tokenizer, tmp_path, B, tokenizer.mask_token_id)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, _ = mars.load(str(tmp_path), "cpu")
    questions = [mars.chat_ids(tokenizer, mars.messages_of(row)[:-1]) for row in mars.toy_rows("test", 8)]
    theirs = mars.hf_generate(plain, questions, 40, batch_size)
    assert mars.generate(ours, questions, 40, 1.0, batch_size=batch_size) == theirs
    assert len({tuple(out.tokens) for out in theirs}) > 4
    assert {n for out in theirs for n in out.steps} == {1}


def test_threshold_one_reads_no_masks_and_finished_rows_cost_nothing():
    """AR rows are fed one token a pass; the rows fed in all passes together are those that were still being decoded."""
    mars.check_model(tiny())  # once a model: not to be counted
    shapes = []
    hook = tiny().register_forward_pre_hook(lambda _, args, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    texts = prompts(9, seed=3)
    outs = mars.generate(tiny(), texts, 30, 1.0, batch_size=4)
    assert sum(n for n, _ in shapes) == sum(len(out.steps) for out in outs)
    assert {q for _, q in shapes} - {len(p) for p in texts} <= {1}
    shapes.clear()
    outs = mars.generate(tiny(), texts, 30, 0.4, batch_size=4)
    hook.remove()
    assert sum(n for n, _ in shapes) == sum(len(out.steps) for out in outs)
    assert {q for _, q in shapes} - {len(p) + B - 1 for p in texts} <= set(range(B, 2 * B))


def test_thresholds_per_request_and_on_the_fly():
    """The knob may differ from row to row, and turn while it runs; a row at τ = 1 beside drafting rows stays AR."""
    texts, taus = prompts(6), [1.0, 0.2, 0.9, 1.0, 0.5, 0.05]
    outs = mars.generate(tiny(), texts, 40, taus, batch_size=3)
    check(tiny(), texts, outs, taus, 40)
    knob = iter([1.0, 1.0, 0.05, 0.05, 1.0, 0.05] + [1.0] * 99)
    (out,) = mars.generate(tiny(), texts[4:5], 20, lambda: next(knob))
    assert out.steps[0] == out.steps[1] == out.steps[4] == 1 and out.steps[2:4] == [B, B] and set(out.steps[6:]) <= {1}


def test_the_first_end_token_inside_a_run_ends_the_row():
    """What lies beyond an end token is neither emitted nor counted, and token limits cut a run as well."""
    assert mars.until_end([5, 1, 6, 1], {1}) == [5, 1] and mars.until_end([5, 6], {1}) == [5, 6]
    outs = mars.generate(tiny(), prompts(30), 64, 0.05)
    ended = [out for out in outs if out.stop == "eos"]
    assert any(out.steps[-1] < B for out in ended) and all(sum(t in ENDS for t in out.tokens) == 1 for out in ended)
    for n in range(1, 9):
        cut = mars.generate(tiny(), prompts(30), n, 0.05)
        assert [out.tokens for out in cut] == [out.tokens[:n] for out in outs]
        assert all(out.stop == ("eos" if out.tokens[-1] in ENDS else "length") for out in cut)


def test_a_row_ends_at_the_end_of_the_window():
    """Decoding stops at the model's context window, and masks beyond it disturb nothing."""
    model, prompt = tiny(max_position_embeddings=16), [5, 6, 7, 8, 9, 10]
    (out,) = mars.generate(model, [prompt], 256, 0.3)
    assert len(out.tokens) <= 10 and (out.stop == "eos" or len(out.tokens) == 10)
    assert out == mars.naive_generate(model, prompt, 10, 0.3, B)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_may_arrive_while_it_runs(temperature):
    """An iterator is asked before every pass, may answer None, and no row waits for or depends on its company."""
    texts, times = prompts(7), [3, 0, 0, 9, 1, 30, 0]

    def arrivals():
        for prompt, wait in zip(texts, times):
            yield from [None] * wait
            yield prompt

    outs = [[] for _ in texts]
    for index, tokens in mars.stream(tiny(), arrivals(), 25, 0.4, batch_size=3, temperature=temperature):
        outs[index] += tokens
    options = dict(batch_size=8, temperature=temperature)
    assert outs == [out.tokens for out in mars.generate(tiny(), texts, 25, 0.4, **options)]


def test_sampling_noise_belongs_to_seed_request_and_position():
    """A token's Gumbel noise is the same in any company, and argmax(logits + noise) draws from the softmax."""
    noise = mars.gumbel(3, [5, 2], torch.tensor([[7, 8], [9, 10]]), 11)
    assert torch.equal(noise[1, 0], mars.gumbel(3, [2], torch.tensor([[9]]), 11)[0, 0])
    assert len({tuple(x.tolist()) for x in noise.flatten(0, 1)} | {tuple(mars.gumbel(4, [5], torch.tensor([[7]]), 11)[0, 0].tolist())}) == 5
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = (logits + mars.gumbel(0, list(range(100)), torch.arange(400).repeat(100, 1), 4)).argmax(-1)
    expected = 40000 * logits.softmax(-1)
    chi_square = ((draws.flatten().bincount(minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001
    outs = [mars.generate(tiny(), prompts(5), 20, 0.5, temperature=1.0, seed=seed, batch_size=n) for seed, n in ((0, 1), (0, 5), (1, 5))]
    assert outs[0] == outs[1] != outs[2]


def test_the_three_metrics():
    """Top probability, margin of the top two, and entropy in nats; each has a threshold at which it is AR."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert mars.confidence(logits, "probability").item() == pytest.approx(0.5)
    assert mars.confidence(logits, "margin").item() == pytest.approx(0.2)
    assert mars.confidence(logits, "entropy").item() == pytest.approx(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    greedy = mars.generate(tiny(), prompts(4), 20, 1.0)
    for metric, ar, loose in (("margin", 1, 1e-9), ("entropy", 0, 99.0)):
        assert mars.generate(tiny(), prompts(4), 20, ar, metric=metric) == greedy
        assert all(set(out.steps[:-1]) <= {B} for out in mars.generate(tiny(), prompts(4), 20, loose, metric=metric))
        some = mars.generate(tiny(), prompts(4), 20, 0.4, metric=metric)
        assert {1, 2} <= {n for out in some for n in out.steps}


def test_a_hand_worked_pass_over_the_cache():
    """The token at position p goes to slot p of its row's line, padding to the spare slot; position q sees the slots ≤ q."""
    cache = mars.SlotCache(3, 99)
    positions, seen = cache.prepare(1, [2, 5], back=3, drafts=0, masks=1, device="cpu")  # lines 1 and 2; the first row is short of a token
    S = cache.size
    assert positions.tolist() == [[0, 0, 1, 2], [2, 3, 4, 5]] and cache.width == 6 < S
    assert cache.target.tolist() == [S + S - 1, S, S + 1, S + 2, 2 * S + 2, 2 * S + 3, 2 * S + 4, 2 * S + 5]
    assert seen.sum(-1).tolist() == [[[1, 1, 2, 3]], [[3, 4, 5, 6]]] and seen[1, 0, 0].tolist() == [True] * 3 + [False] * 3


def test_stale_cache_slots_are_never_seen(monkeypatch, at_once):
    """Poison every slot that a pass does not write and that nothing has committed: the output stays the same."""
    prepare = mars.SlotCache.prepare

    def poisoned(self, first, lengths, back, *rest):
        for line, length in enumerate(lengths, first):
            for buffer in (b for layer in self.layers for b in layer):
                buffer[line, max(length - back, 0) :] = 1e4
        return prepare(self, first, lengths, back, *rest)

    rules = (dict(threshold=0.3), dict(lossless=True))
    before = [mars.generate(drafter(), walks(6), 40, batch_size=3, **rule) for rule in rules]
    monkeypatch.setattr(mars.SlotCache, "prepare", poisoned)
    assert [mars.generate(drafter(), walks(6), 40, batch_size=3, **rule) for rule in rules] == before


@functools.cache
def drafter(block_size=B):
    """A tiny model that was trained with masks on random walks, so that many of its drafts are right and many are not."""
    config = transformers.Qwen2Config(**{**tiny().config.to_dict(), "initializer_range": 0.05})
    torch.manual_seed(0)  # after tiny(), which draws too when it is first made
    model = transformers.Qwen2ForCausalLM(config)
    model.config.mars_block_size, model.generation_config = block_size, tiny().generation_config
    data = [(walk[:3], walk[3:]) for walk in walks(400, 24)]
    for _ in mars.train(mars.Training(model, 150, 1e-2), data, block_size=block_size, mask_id=MASK, batch_size=16):
        pass
    return model


def walks(n, length=5, seed=0):
    """Token sequences in which the next is a function of the last, or now and then anything."""
    rng, all = random.Random(seed), []
    for _ in range(n):
        walk = [rng.randrange(2, MASK)]
        while len(walk) < length:
            walk.append(2 + (walk[-1] * 7 + 3) % (MASK - 2) if rng.random() < 0.9 else rng.randrange(2, MASK))
        all.append(walk)
    return all


@pytest.fixture
def any_plan(monkeypatch):
    """Draw the plan and the number of masks at random before every pass: no test depends on the machine's speed."""
    rng = random.Random(0)

    def choose(self, rows, drafts):
        self.plan = rng.choice(self.PLANS)
        return rng.randint(0, self.most)

    monkeypatch.setattr(mars.DraftScheduler, "choose", choose)


@pytest.fixture
def at_once(monkeypatch):
    """All drafts in every pass, whatever the machine's speed."""
    monkeypatch.setattr(mars.DraftScheduler, "choose", lambda self, rows, drafts: self.most)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_lossless_output_is_that_of_ar_decoding(block_size, temperature, any_plan):
    """Drafts are committed only where AR decoding chooses the same, greedy or sampled, in any batch, however many there are."""
    model, texts = drafter(block_size), [walk[: 1 + i % 5] for i, walk in enumerate(walks(20, seed=1))]
    options = dict(temperature=temperature, seed=5)
    alone = mars.generate(model, texts, 30, 1.0, batch_size=1, **options)
    for batch_size in (1, 4, 16):
        outs = mars.generate(model, texts, 30, lossless=True, batch_size=batch_size, **options)
        assert [out.tokens for out in outs] == [out.tokens for out in alone] and [out.stop for out in outs] == [out.stop for out in alone]
        assert {n for out in outs for n in out.steps} >= set(range(1, min(block_size, 4) + 1)), "acceptance should vary"
        assert all(sum(out.steps) == len(out.tokens) for out in outs)
    for limit in range(1, 7):
        cut = mars.generate(model, texts, limit, lossless=True, **options)
        assert [out.tokens for out in cut] == [out.tokens[:limit] for out in alone]


@pytest.mark.parametrize("rule", [dict(threshold=1.0), dict(lossless=True)])
def test_sampling_has_the_exact_distribution(rule, any_plan):
    """20,000 draws of three tokens against the model's own probabilities, jointly: chi-square at p = 0.001."""
    model = tiny(vocab_size=6, initializer_range=0.15)
    model.config.mars_mask_token_id, model.generation_config = 5, transformers.GenerationConfig(pad_token_id=0, suppress_tokens=[5])
    prompt, n = [1, 2], 20_000
    triples = torch.cartesian_prod(*[torch.arange(5)] * 3)  # [125, 3]
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(prompt).repeat(125, 1), triples], 1)).logits[:, 1:4, :5]
    exact = n * logits.softmax(-1).gather(2, triples[..., None]).prod(1).flatten()  # [125]
    outs = mars.generate(model, [prompt] * n, 3, temperature=1.0, batch_size=1000, **rule)
    assert rule.get("threshold") or max(out.steps[1] for out in outs) > 1
    drawn = torch.tensor([out.tokens for out in outs]) @ torch.tensor([25, 5, 1])
    counts, rare = drawn.bincount(minlength=125), exact < 5
    counts, exact = (torch.cat([x[~rare], x[rare].sum(0, keepdim=True)]) for x in (counts, exact))
    assert len(counts) > 30
    chi_square, df = ((counts - exact) ** 2 / exact.clamp(min=1e-9)).sum(), len(counts) - 1
    assert chi_square < df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3  # Wilson and Hilferty


def test_a_hand_worked_lossless_pass():
    """One pass reads the last token, the drafts, and a group of masks for each, which sees its own draft and not the others."""
    cache = mars.SlotCache(1, 99)
    positions, seen = cache.prepare(0, [4], back=1, drafts=1, masks=2, device="cpu")  # 3 | draft 4 | masks 4 5 after 3 | masks 5 6 after the draft
    assert positions.tolist() == [[3, 4, 4, 5, 5, 6]] and cache.target.tolist() == [3, 4, 5, 6, 7, 8]
    # slots                      0  1  2  3  4  5  6  7  8
    assert seen[0, 0].int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 0, 0, 1, 1],
    ]


def test_drafts_continue_from_the_last_that_was_accepted(at_once):
    """After every pass the drafts are what masks predict behind all that is committed but the newest token: pass by pass."""
    model, texts = drafter(), walks(12, seed=2)
    outs = mars.generate(model, texts, 24, lossless=True, batch_size=5)
    for text, out, ar in zip(texts, outs, mars.generate(model, texts, 24, 1.0)):
        done, steps, drafts = 0, [], []
        while done < len(ar.tokens):
            count = 1
            while count <= len(drafts) and done + count < len(ar.tokens) and drafts[count - 1] == ar.tokens[done + count - 1]:
                count += 1
            steps.append(count)
            done += count
            logits = model(torch.tensor([text + ar.tokens[: done - 1] + [MASK] * (B - 1)])).logits[0, 1 - B :]
            drafts = logits[:, :MASK].argmax(-1).tolist()
        assert out.steps == steps
    assert {1, B} < {n for out in outs for n in out.steps}


def test_drafts_may_come_from_the_text_so_far():
    """What followed the last three or two tokens where they last occurred before is a draft, if that is the plan."""
    scheduler = mars.DraftScheduler(3)
    scheduler.plan = "text"
    assert scheduler.drafts([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert scheduler.drafts([9, 2, 3, 7, 1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2], "three tokens count before two, late before early"
    assert scheduler.drafts([2, 3, 7, 1, 2, 3]) == [7, 1, 2] and scheduler.drafts([5, 5, 5]) == [5]
    assert scheduler.drafts([1, 2, 3, 4, 3]) == scheduler.drafts([1]) == scheduler.drafts([]) == []
    scheduler.plan = "none"
    assert scheduler.drafts([5, 5, 5]) == []


def test_the_fastest_plan_is_followed_and_the_others_are_tried():
    """The plan with the most tokens per second gets nearly all passes, for each number of rows; none is forgotten."""
    scheduler, speed, masks = mars.DraftScheduler(3), {"at once": 90, "in turns": 80, "text": 50, "none": 40}, set()

    def run(rows, passes):
        taken = []
        for _ in range(passes):
            masks.add((scheduler.choose(rows, 3), scheduler.plan))
            scheduler.record(rows, speed[scheduler.plan], 1.0)
            taken.append(scheduler.plan)
        return [taken.count(plan) / passes for plan in scheduler.PLANS]

    assert run(1, 2048)[0] > 0.9 and set(scheduler.rates) == {(1, plan) for plan in scheduler.PLANS}
    speed |= {"at once": 20, "text": 95}
    run(1, 2048)
    assert run(1, 1024)[2] > 0.9, "when the speeds change, so does the plan"
    assert run(16, 1024)[2] > 0.9
    assert masks == {(3, "at once"), (0, "in turns"), (0, "text"), (0, "none")}
    scheduler.plan, scheduler.passes = "in turns", 1
    assert scheduler.choose(1, 0) == 3, "in turns: no drafts at hand, so masks are read"


# ---------------------------------------------------------------------------------------------------------------------
# Data, checkpoints, command line
# ---------------------------------------------------------------------------------------------------------------------


def test_toy_problems_are_disjoint_and_solvable():
    """No test problem is a training problem, every reference answer is right, and wrong answers are wrong."""
    training, held_out = mars.toy_rows("train", 3000), mars.toy_rows("test", 1000)
    assert not {row["key"] for row in training} & {row["key"] for row in held_out}
    assert held_out == mars.toy_rows("test", 1000) != mars.toy_rows("test", 1000, seed=1)
    for row in held_out:
        assert evaluation.score_number(row, row["answer"], None)["correct"]
        assert not evaluation.score_number(row, row["answer"] + "1", None)["correct"]


def test_the_response_is_found_and_ends_with_its_end_token():
    """Prompt and response are what the decoder reads and writes; what was cut has no end token."""
    _, tokenizer = mars.toy_model()
    row = {"question": "Ann has 9 figs.", "answer": "#### 9"}
    ((prompt, response),), _ = mars.encode(tokenizer, row)
    assert tokenizer.decode(prompt) == "User:\nAnn has 9 figs.<|end|>\nAssistant:\n"
    assert tokenizer.decode(response) == "#### 9<|end|>"
    assert prompt == mars.chat_ids(tokenizer, mars.messages_of(row)[:1])
    assert mars.closing_token(tokenizer) == tokenizer.eos_token_id
    assert mars.encode(tokenizer, row, len(prompt) + 2) == ([(prompt, response[:2])], [])


def chat_with(user="How many figs?", **turn):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", **turn}]}


def test_every_form_of_a_chat_is_the_same_chat():
    """Columns may have several names, and content may be in parts."""
    _, tokenizer = mars.toy_model()
    parts = [{"type": "text", "text": text, "image_url": None} for text in ("How many ", "figs?")]
    ask, reply = chat_with(content="9")["messages"]
    expected = mars.encode(tokenizer, {"question": "How many figs?", "answer": "9"})
    assert len(expected[0]) == 1 and not expected[1]
    for row in (
        {"prompt": "How many figs?", "completion": "9"},
        {"prompt": [ask], "completion": [reply]},
        {"prompt": [ask], "completion": "9", "messages": None},
        {"question": "How many figs?", "answer": 9},
        {"messages": [ask, reply, ask], "prompt": "a", "completion": "b"},
        {"messages": [{"role": "user", "content": parts}, reply | {"tool_calls": None}]},
    ):
        assert mars.encode(tokenizer, row) == expected, row


CHAT = [
    {"role": "system", "content": "Count.", "name": None},
    {"role": "user", "content": "How many figs?"},
    {"role": "assistant", "content": "9 figs."},
    {"role": "user", "content": "Look again."},
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "count", "arguments": {"of": "figs"}}}],
    },
    {"role": "tool", "content": "8"},
    {"role": "assistant", "content": "8 figs."},
]
TEMPLATES = {  # the ways of well-known ones
    "chatml": "{% if tools %}<s>tools\n{{ tools | tojson }}</s>\n{% endif %}"
    "{% if messages[0].role != 'system' %}<s>system\nHelp.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "bos": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    "strict": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "thinking": "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}",
}


def tokenizer_with(template, bos=None):
    _, tokenizer = mars.toy_model()
    names = {"additional_special_tokens": ["</s>"]} | ({"bos_token": bos} if bos else {})
    tokenizer.add_special_tokens(names)
    if bos:  # it adds one by itself, as Llama's and Gemma's do
        single = [(bos, tokenizer.bos_token_id)]
        adder = TemplateProcessing(f"{bos} $A", special_tokens=single)
        tokenizer.backend_tokenizer.post_processor = adder
        assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def test_every_turn_of_a_chat_is_learnt():
    """Each assistant turn is an example, with all that came before as its prompt."""
    tokenizer = tokenizer_with("chatml")
    found, problems = mars.encode(tokenizer, {"messages": CHAT})
    responses = [tokenizer.decode(response) for _, response in found]
    assert responses == ["9 figs.</s>", '[count {"of": "figs"}]</s>', "8 figs.</s>"]
    assert not problems
    assert tokenizer.decode(found[1][0]).startswith("<s>system\nCount.</s>\n<s>user\nHow many figs?")
    assert tokenizer.decode(found[2][0]).endswith("<s>tool\n8</s>\n<s>assistant\n")
    assert [mars.chat_ids(tokenizer, CHAT[:n]) for n in (2, 4, 6)] == [prompt for prompt, _ in found]
    ((prompt, _),), _ = mars.encode(tokenizer, {"messages": CHAT[1:3]})
    assert tokenizer.decode(prompt).startswith("<s>system\nHelp.</s>")  # the template's own
    fits = len(found[1][0])
    some, problems = mars.encode(tokenizer, {"messages": CHAT}, fits)
    assert some == found[:1] and problems == [f"prompt of {fits} tokens or more"] * 2


@pytest.mark.parametrize("arguments, learnt", [
    ({"of": "figs"}, '{"of": "figs"}'), ('{"of": "figs"}', '{"of": "figs"}'), ("", "{}"),
    ({"of": "figs", "city": None, "at": {"x": None}}, '{"of": "figs", "at": {}}'),  # Parquet
    ({"of": [1, None]}, '{"of": [1, null]}'), ('{"of": null}', '{"of": null}'),  # real nulls
])  # fmt: skip
def test_tool_calls_are_learnt_as_they_are_called(arguments, learnt):
    """Arguments may be JSON text, and nulls that pad a dict are left out; `tools` likewise."""
    tokenizer = tokenizer_with("chatml")
    call = {"function": {"name": "count", "arguments": arguments}, "id": None}
    tools = [{"type": "function", "function": {"name": "count", "parameters": {"of": {}}}}]
    padded = [tools[0] | {"strict": None}]
    written = []
    for given in (tools, padded, json.dumps(tools)):
        row = {"messages": [CHAT[1], {"role": "assistant", "tool_calls": [call]}], "tools": given}
        ((prompt, response),), _ = mars.encode(tokenizer, row)
        assert tokenizer.decode(response) == f"[count {learnt}]</s>"
        written.append(tokenizer.decode(prompt))
    assert written == [written[0]] * 3 and written[0].startswith('<s>tools\n[{"type": "function"')


def test_a_beginning_of_text_is_written_once():
    """Where the tokenizer adds a BOS token by itself, the template's is the only one."""
    tokenizer = tokenizer_with("bos", "<s>")
    ((prompt, response),), _ = mars.encode(tokenizer, {"messages": CHAT[1:3]})
    assert prompt.count(tokenizer.bos_token_id) == 1
    assert prompt[0] == tokenizer.bos_token_id not in response
    assert tokenizer.decode(prompt + response) == "<s>[Q] How many figs? [/Q] 9 figs.</s>"
    assert mars.chat_ids(tokenizer, CHAT[1:2]) == prompt


def test_a_plain_template_writes_the_beginning_of_text_that_the_tokenizer_adds(tmp_path, capsys):
    """A tokenizer without a template gets a plain one, and the user is told."""
    for bos in (None, "<s>"):
        tokenizer = tokenizer_with(None, bos)
        model, _ = mars.toy_model()
        model.resize_token_embeddings(len(tokenizer))
        mars.save(model, tokenizer_with("chatml", bos), tmp_path, B, 2)
        (tmp_path / "chat_template.jinja").unlink()
        _, loaded = mars.load(str(tmp_path), "cpu")
        assert "plain" in capsys.readouterr().err
        text = loaded.decode(mars.chat_ids(loaded, CHAT[1:2]))
        assert text == (bos or "") + "User:\nHow many figs?<|end|>\nAssistant:\n"


IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]
BROKEN_CALL = [{"function": {"name": "count", "arguments": '{"of": "figs'}}]


@pytest.mark.parametrize("template, row, problem", [
    ("chatml", {"messages": CHAT[:2]}, "no assistant turn"),
    ("chatml", {"messages": []}, "no assistant turn"),
    ("chatml", {"messages": ["Hi"]}, "no assistant turn"),
    ("chatml", {"text": "a"}, "no assistant turn"),
    ("chatml", {"question": "a", "answer": " "}, "empty response"),
    ("chatml", chat_with(content=None), "empty response"),
    ("chatml", chat_with(content=[]), "empty response"),
    ("chatml", chat_with(IMAGE, content="a"), "content that is not text: [{'type': 'image_url'"),
    ("chatml", chat_with(content={"a": "b"}), "content that is not text: {"),
    ("chatml", chat_with("<|mask|>", content="a"), "the control token <|mask|> is written out"),
    ("chatml", chat_with(content="a <|end|>."), "the control token <|end|> is written out"),
    ("chatml", chat_with(content="a</s>"), "the control token </s> is written out"),
    ("chatml", chat_with("a</s>" * 99, content="a"), "the control token </s> is written out"),
    ("chatml", chat_with(tool_calls=BROKEN_CALL), "tool-call arguments that are not JSON"),
    ("strict", {"messages": CHAT[:3]}, "refused by the chat template (no system role)"),
    ("chatml", {"messages": CHAT[2:3]}, "refused by"),
    ("thinking", {"messages": CHAT[1:3]}, "the chat template writes a question differently once"),
    ("chatml", {"question": "fig " * 99, "answer": "a"}, "prompt of 99 tokens or more"),
    ("chatml", chat_with(content="a") | {"tools": "[{"}, "refused by the chat template (Expecting"),
])  # fmt: skip
def test_what_cannot_be_learnt_is_counted_and_said(template, row, problem, capsys):
    """A row that cannot be used is not fatal, only a data set of nothing else."""
    tokenizer = tokenizer_with(template)
    found, (said,) = mars.encode(tokenizer, row, 99)
    assert not found and said.startswith(problem)
    good = chat_with(content="<think>so</think>9")
    examples = mars.tokenize(tokenizer, [row, good], 99)
    assert len(examples) == 1
    assert f"1 examples, 1 unusable rows\n  1 × {problem}" in capsys.readouterr().out
    with pytest.raises(mars.MarsError, match="nothing to train on in 1 rows: 1 × "):
        mars.tokenize(tokenizer, [row], 99)


def test_a_question_is_answered_or_refused_in_one_line():
    """Half a surrogate pair is replaced, also on the command line; no control token passes."""
    _, tokenizer = mars.toy_model()
    expected = mars.chat_ids(tokenizer, [{"role": "user", "content": "caf\ufffd"}])
    assert mars.chat_ids(tokenizer, [{"role": "user", "content": "caf\udce9"}]) == expected
    ((prompt, response),), _ = mars.encode(tokenizer, {"question": "caf\ud83d", "answer": "\ud83d"})
    assert prompt == expected and tokenizer.decode(response) == "\ufffd<|end|>"
    for text in ("What is <|mask|>?", "<|end|>", IMAGE):
        with pytest.raises(mars.MarsError, match="control token|not text"):
            mars.chat_ids(tokenizer, [{"role": "user", "content": text}])


def test_an_end_token_that_is_not_marked_special_is_no_text(monkeypatch):
    """What ends a turn may not be written out, and what merely is an added token may."""
    tokenizer = tokenizer_with(TEMPLATES["strict"].replace("</s>", "<|stop|>"))
    tokenizer.add_tokens(["<|stop|>", "<think>"])
    ((_, response),), _ = mars.encode(tokenizer, chat_with(content="<think>9"))
    assert tokenizer.convert_ids_to_tokens(response) == ["<think>", "9", "<|stop|>"]
    assert "<|stop|> is written out" in mars.encode(tokenizer, chat_with(content="a<|stop|>"))[1][0]
    monkeypatch.setattr(mars, "ids_of", lambda *_: 1 / 0)  # whatever a tokenizer raises
    assert mars.encode(tokenizer, chat_with(content="a")) == ([], ["division by zero"])


def test_rows_are_read_from_files_of_every_kind(tmp_path, monkeypatch):
    """JSON by line or as an array, gzipped or not; data sets as Parquet, saved, or on the hub."""
    rows = [{"question": "a", "answer": "9"}, {"question": "b\ud83d", "answer": "c"}]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "lines.jsonl").write_text(lines)
    (tmp_path / "marked.jsonl").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("lines.jsonl", "marked.jsonl", "array.json", "lines.jsonl.gz"):
        assert mars.read_rows(str(tmp_path / name), "train") == rows, name
    rows = rows[:1] * 3
    data = datasets.Dataset.from_list(rows)
    splits = datasets.DatasetDict(train=data, test=data.select([0]))
    data.to_parquet(tmp_path / "file.parquet")
    data.save_to_disk(tmp_path / "one")
    splits.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder/data").mkdir(parents=True)
    for split, part in splits.items():
        part.to_parquet(tmp_path / "folder/data" / f"{split}.parquet")
    for name, n in (("file.parquet", 3), ("one", 3), ("saved", 1), ("folder", 1)):
        assert list(mars.read_rows(str(tmp_path / name), "test")) == rows[:n], name
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: asked.append((a, o)) or data)
    assert list(mars.read_rows("openai/gsm8k:main", "test")) == rows
    mars.read_rows("openai/openai_humaneval", "train")
    assert asked[0] == (("openai/gsm8k", "main"), {"split": "test"})
    assert asked[1] == (("openai/openai_humaneval",), {"split": "train"})


@pytest.mark.parametrize("name, text, problem", [
    ("a.jsonl", '{"a": 1}\n{"a', "a.jsonl, line 2 is not a JSON object"),
    ("a.jsonl", "[1]\n", "line 1 is not"), ("a.jsonl", '{"a": 1}\n9', "line 2 is not"),
    ("a.json", '[{"a": 1},\n{"a" 1}]', "line 2 is not"), ("a.json", '{\n"a": 1}', "line 1 is not"),
    ("a.json", "[]", "is empty"), ("a.jsonl", "\n", "is empty"),
    ("a.jsonl.gz", "{}", "a JSON object: Not a gzipped"), ("b.jsonl", "", "no data file"),
    ("b", "", "cannot load"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_with_its_line(name, text, problem, tmp_path):
    """What cannot be read is said in one line."""
    if not name.startswith("b"):
        (tmp_path / name).write_text(text)
    with pytest.raises(mars.MarsError, match=problem):
        mars.read_rows(str(tmp_path / name), "train")


def test_a_data_set_on_disk_and_its_splits(tmp_path, checkpoint, capsys):
    """A data set of the hub's kind is read by name and --split; a tools column may be text."""
    (tmp_path / "data").mkdir()
    rows = [{"messages": CHAT[1:3], "tools": None}, {"messages": CHAT[:2], "tools": "[]"}]
    command = f"train --model {checkpoint} --data {tmp_path}/data --max-steps 1"
    for split, n in (("train", 1), ("test", 2)):
        datasets.Dataset.from_list(rows * n).to_parquet(tmp_path / "data" / f"{split}.parquet")
    for split, n in (("train", 1), ("test", 2)):
        mars.main(f"{command} --split {split} --out {tmp_path}/{split}".split())
        said = f"{n} examples, {n} unusable rows\n  {n} × no assistant turn"
        assert said in capsys.readouterr().out


def test_examples_are_shown_as_they_are_trained(capsys):
    """--show-examples: every position with what it learns, and what its mask learns and sees."""
    _, tokenizer = mars.toy_model()
    prompt, response = mars.encode(tokenizer, {"question": "Ann has 9 figs.", "answer": "9 figs and\n5 eggs"})[0][0]
    mars.show_example(tokenizer, (prompt, response, 1), 3, 2, False)
    head, table = capsys.readouterr().out.split("sees\n")
    assert f"{len(prompt)} prompt tokens, {len(response)} response tokens" in head and "\x1b" not in table
    lines = [line.split() for line in table.splitlines()]
    clean = [line[0] for line in lines]
    assert clean[0] == ":⏎" and clean[-1] == "<|end|>" and [line[1] for line in lines[:-1]] == clean[1:] and "·figs" in clean
    index, start = (t.tolist() for t in mars.noisy_stream(len(response), 3, 1))
    masks = {i + 1: line[2:] for i, line in enumerate(lines, -1) if len(line) > 2}
    assert masks == {i + 1: ["M", clean[i + 2], f"x<{s}"] for i, s in zip(index, start)}


@pytest.mark.parametrize("spare, own, name, token", [
    (0, True, None, "<|mask|>"),  # the tokenizer's own
    (0, True, "<|mask|>", "<|mask|>"),  # the same by name
    (3, False, None, "<|mask|>"),  # a new name on a row that no token uses (Qwen2.5)
    (3, False, "<|new|>", "<|new|>"),
    (3, True, "<|new|>", "<|new|>"),  # a name goes before the tokenizer's own
    (0, False, "<|spare|>", "<|spare|>"),  # an unused special token by name (SmolLM2)
    (0, False, None, None), (0, False, "Ann", None), (3, False, "Ann", None),
    (3, True, "Ann", None),
    (0, False, "<|end|>", None), (0, False, "<|new|>", None),
])  # fmt: skip
def test_the_mask_token_takes_a_row_that_is_there(spare, own, name, token, tmp_path):
    """The tokenizer's own, else a row without a token, else an unused special token by name."""
    model, tokenizer = mars.toy_model()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|spare|>"]})
    if not own:  # an unused special token like any other
        tokenizer.mask_token = None
    model.resize_token_embeddings(len(tokenizer) + spare)
    rows = model.get_input_embeddings().num_embeddings
    if token is None:
        with pytest.raises(mars.MarsError, match="--mask-token") as error:
            mars.choose_mask_token(model, tokenizer, name)
        assert "<|spare|>" in str(error.value) and "<|end|>," not in str(error.value)
        return
    mask_id = mars.choose_mask_token(model, tokenizer, name)
    assert tokenizer.convert_ids_to_tokens(mask_id) == tokenizer.mask_token == token
    assert mask_id < rows and mask_id not in (tokenizer.eos_token_id, tokenizer.pad_token_id)
    mars.save(model, tokenizer, tmp_path, B, mask_id)
    loaded, again = mars.load(str(tmp_path), "cpu")
    assert loaded.get_input_embeddings().num_embeddings == loaded.config.vocab_size == rows
    assert loaded.config.mars_mask_token_id == again.mask_token_id == mask_id
    assert mars.choose_mask_token(loaded, again, name) == mask_id
    assert loaded.generation_config.suppress_tokens == [mask_id]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert mask_id not in plain.generate(torch.tensor([[5, 6]]), max_new_tokens=20)[0]


@pytest.mark.parametrize("spare", [0, 3])
def test_a_new_mask_token_never_takes_the_id_of_another(spare):
    """Where ids have a gap, a new token would get the id of an old one."""
    model, tokenizer = mars.toy_model()
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = {token: i + (i >= 50) for token, i in parts["model"]["vocab"].items()}
    parts["model"]["vocab"] = vocab
    parts["added_tokens"].pop()  # <|mask|>
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<|end|>"
    )
    model.resize_token_embeddings(max(vocab.values()) + 1 + spare)
    with pytest.raises(mars.MarsError, match="no room for a mask token"):
        mars.choose_mask_token(model, tokenizer)


def test_a_checkpoint_carries_what_decoding_needs(tmp_path):
    """config.json has block size and mask id; the generation config ends and suppresses right."""
    model, tokenizer = mars.toy_model()
    mars.save(model, tokenizer, tmp_path, B, tokenizer.mask_token_id)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mars_block_size"] == B
    assert config["mars_mask_token_id"] == tokenizer.mask_token_id
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [tokenizer.mask_token_id]
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]
    loaded, again = mars.load(str(tmp_path), "cpu")
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    assert again("Ann has 9 figs.").input_ids == tokenizer("Ann has 9 figs.").input_ids


@pytest.mark.parametrize("options, complaint", [
    (dict(threshold=0.0), "out of range"), (dict(threshold=1.5), "out of range"), (dict(threshold=[0.5]), "1 thresholds for 2 prompts"),
    (dict(threshold=-1, metric="entropy"), "out of range"), (dict(metric="top"), "no metric"), (dict(block_size=5), "block size 5"),
    (dict(max_new_tokens=0), "at least 1"), (dict(batch_size=0), "at least 1"), (dict(temperature=-1), "temperature"),
    (dict(threshold=math.nan), "out of range"), (dict(threshold=0.9, lossless=True), "no threshold"),
])  # fmt: skip
def test_options_out_of_range_are_refused(options, complaint):
    """Errors come before the work begins, and say what is wrong."""
    with pytest.raises(mars.MarsError, match=complaint):
        mars.stream(tiny(), prompts(2), **options)


def test_models_that_would_be_silently_wrong_are_refused():
    """Without drafts there is no threshold; some layers, positions and masks would be wrong."""
    plain = copy.deepcopy(tiny())
    plain.config.mars_block_size = None
    assert mars.generate(plain, [[5]], 3, 1.0)[0].steps
    for rule in (dict(threshold=0.9), dict(lossless=True)):
        with pytest.raises(mars.MarsError, match="not trained with masks"):
            mars.generate(plain, [[5]], 3, **rule)
    for prompt in ([], [5] * 256):
        with pytest.raises(mars.MarsError, match="window is 256"):
            mars.generate(tiny(), [prompt], 3, 1.0)
    longrope = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    longrope |= dict(rope_theta=10000.0)
    phi3 = dict(original_max_position_embeddings=80, rope_parameters=longrope)
    for reason, kind, options in (
        ("sdpa", "llama", dict(attn_implementation="eager")), ("sdpa", "gemma2", {}),
        ("sdpa", "llama", dict(attn_implementation="flex_attention")),
        ("recurrent", "mamba", {}), ("recurrent", "qwen3_next", dict(head_dim=8)),
        ("chunked", "llama4_text", dict(head_dim=8)),
        ("longest row", "phi3", phi3),
        ("sdpa", "bloom", {}), ("does not take", "opt", {}),
    ):  # fmt: skip
        with pytest.raises(mars.MarsError, match=reason):
            mars.generate(tiny.__wrapped__(kind, **options), [[5]], 3, 1.0)


@pytest.mark.parametrize("ignored", "attention_mask position_ids logits_to_keep cap".split())
def test_a_model_that_differs_on_a_tiny_example_is_refused(ignored, monkeypatch):
    """What it predicts in training and over the cache must be what it predicts for plain text."""
    model = copy.deepcopy(tiny("gemma3_text"))
    if ignored == "cap":
        monkeypatch.setattr(mars, "project", lambda model, h: model.get_output_embeddings()(h))
    for module in (model, model.model):
        hook = lambda _, args, kw: (args, {k: v for k, v in kw.items() if k != ignored})
        module.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(mars.MarsError, match="those of the plain|does not take"):
        mars.check_model(model)


@functools.cache
def saved(change, folder):
    """A toy checkpoint in a folder, changed before it is written."""
    model, tokenizer = mars.toy_model()
    change(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pad_beyond(model, tokenizer):
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})


def token_beyond(model, tokenizer):
    tokenizer.add_tokens(["<beyond>"])


def template_beyond(model, tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "<|turn|>" + tokenizer.chat_template


def not_a_number(model, tokenizer):
    model.model.norm.weight.data[0] = math.nan


def one_row_infinite(model, tokenizer):
    model.get_input_embeddings().weight.data[300, 0] = math.inf


def no_end(model, tokenizer):
    tokenizer.eos_token = tokenizer.chat_template = None


def no_end_anywhere(model, tokenizer):
    no_end(model, tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = None


@pytest.mark.parametrize("change, problem", [
    (pad_beyond, None), (no_end, None),
    (token_beyond, r"the token <beyond> has id (\d+), but the model has \1 embeddings"),
    (template_beyond, "<|turn|> has id"), (not_a_number, "norm.weight"),
    (one_row_infinite, "embed_tokens"), (no_end_anywhere, "eos_token"),
])  # fmt: skip
def test_what_would_fail_later_is_refused_at_loading(change, problem, tmp_path):
    """Tokens without an embedding, weights that are no numbers, texts without an end."""
    folder = saved(change, tmp_path)
    if problem:
        with pytest.raises(mars.MarsError, match=problem):
            mars.load(folder, "cpu")
        return
    model, tokenizer = mars.load(folder, "cpu")
    ((prompt, response),), _ = mars.encode(tokenizer, {"question": "a", "answer": "b"})
    assert response[-1] == tokenizer.eos_token_id == 0 and mars.end_tokens(model) == {0}
    assert model.generation_config.pad_token_id < model.config.vocab_size
    mars.hf_generate(model, [[5, 6, 7], [5]], 3, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    model, tokenizer = mars.toy_model()
    mars.save(model, tokenizer, folder, B, tokenizer.mask_token_id)
    return str(folder)


@pytest.mark.parametrize("command, complaint", [
    ("generate --model {tmp}/none Hi", "python mars.py train"), ("generate --model {tmp}/broken Hi", "python mars.py train"),
    ("generate --model {tmp}/truncated Hi", "python mars.py train"), ("generate --model {ok} --threshold 0 Hi", "out of range"),
    ("generate --model {ok} --threshold 0.9 --lossless Hi", "no threshold"), ("generate --model {ok} --block-size 9 Hi", "block size 9"), ("generate --model {ok} --max-new-tokens 3 {long}", "window"),
    ("generate --model {ok} --threshold x Hi", "--threshold"), ("bench --model {ok} --thresholds 0.9,2", "out of range"),
    ("train --model {ok}", "--data"), ("train --block-size 1", "block size 1"), ("train --model {ok} --data {tmp}/none.jsonl", "no data file"),
    ("train --model {ok} --data {tmp}/empty.jsonl", "is empty"), ("train --model {ok} --data {tmp}/bad.jsonl", "line 2"),
    ("generate --model {tmp}/none/x Hi", "python mars.py train"),
    ("generate --model Qwen/Qwen2.5-0.5B-Instruct Hi", "t connect to"),  # with a folder Qwen
    ("generate --model {ok} --device no Hi", "device no"), ("generate --model {ok} <|mask|>", "token <|mask|>"),
    ("train --model {ok} --data {tmp}/columns.jsonl", "no usable columns"), ("train --model {ok} --data {tmp}/none", "cannot load"),
    ("bench --model {ok} --limit 0", "at least 1"), ("bench --model {ok} --batch-sizes 1,x", "at least 1"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_status_2(command, complaint, checkpoint, tmp_path, capsys, monkeypatch):
    """What the user can put right is said in one line, without a traceback."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    for name, text in {"empty.jsonl": "\n", "bad.jsonl": '{"question": "a", "answer": "b"}\n{"question', "columns.jsonl": '{"text": "a"}'}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    mars.save(*mars.toy_model(), tmp_path / "truncated", B, 2)
    weights = tmp_path / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10000])
    words = [w.format(tmp=tmp_path, ok=checkpoint, long="fig " * 600) for w in command.split()]
    with pytest.raises(SystemExit) as stop:
        mars.main(words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and complaint in error and error.count("\n") == 1 and error.startswith("error: ")


def test_too_little_memory_is_one_line(checkpoint, capsys, monkeypatch):
    """A batch that is too large for the device is something the user can put right."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee the manual.")

    monkeypatch.setattr(mars, "forward", full)
    monkeypatch.setattr(mars, "check_model", lambda model: None)
    with pytest.raises(SystemExit) as stop:
        mars.main(["generate", "--model", checkpoint, "Hi"])
    assert stop.value.code == 2 and capsys.readouterr().err == "error: CUDA out of memory. Tried to allocate 9 GiB.\n"


def test_the_commands_work_end_to_end(checkpoint, tmp_path, capsys, monkeypatch):
    """Train on a file of chats, generate, time and evaluate, as a user would."""
    monkeypatch.setattr(mars.sys.stdin, "isatty", lambda: True, raising=False)
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps({k: row[k] for k in ("question", "answer")}) for row in mars.toy_rows("train", 20)))
    out = tmp_path / "out"
    mars.main(f"train --model {checkpoint} --data {data} --out {out} --max-steps 4 --batch-size 2".split())
    assert [mars.trained_block_size(mars.load(str(out / stage))[0]) for stage in ("ar", "mars")] == [1, B]
    result = tmp_path / "r.json"
    mars.main(["generate", "--model", f"{out}/mars", "--max-new-tokens", "8", "--json", str(result), "Ann has 9 figs."])
    printed = capsys.readouterr()
    (row,) = json.loads(result.read_text())["rows"]
    assert row["answer"] in printed.out and "\x1b" not in printed.out and sum(row["steps"]) == len(row["tokens"])
    assert "tokens per pass" in printed.err
    mars.main(f"bench --model {out}/mars --limit 4 --repeats 1 --max-new-tokens 6 --batch-sizes 1,2 --lossless --json {result}".split())
    timed = json.loads(result.read_text())
    modes = ["ar", "mars", "mars", "mars", "lossless"]
    assert [row["mode"] for row in timed["rows"]] == ["hf", "lookup", *modes, "hf", *modes]
    assert timed["rows"][0]["speedup"] == 1 and all(row["same_as_hf"] == 4 for row in timed["rows"] if row["mode"] in ("ar", "lossless", "lookup"))


# ---------------------------------------------------------------------------------------------------------------------
# model.generate of a checkpoint, and answers to a whole file
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A checkpoint whose model is sure of some tokens, its tokenizer, and questions padded on the left."""
    folder = tmp_path_factory.mktemp("talking")
    model, tokenizer = mars.toy_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 8 if weight.ndim > 1 else 1  # otherwise an untrained model repeats one token
    mars.save(model, tokenizer, folder, B, tokenizer.mask_token_id)
    tokenizer.padding_side = "left"
    ask = lambda row: tokenizer.decode(mars.chat_ids(tokenizer, mars.question_of(row)))
    return str(folder), tokenizer, tokenizer([ask(row) for row in mars.toy_rows("test", 8)], padding=True, return_tensors="pt")


def unpadded(inputs):
    return [ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask)]


@pytest.mark.parametrize("rule", [dict(threshold=1.0), dict(threshold=0.05), dict(lossless=True)])
@pytest.mark.parametrize("batch", [1, 8])
def test_generate_of_a_checkpoint_commits_several_tokens_per_pass(rule, batch, talking):
    """With trust_remote_code `model.generate` is ours, in Hugging Face's shape; without, it is AR greedy decoding."""
    folder, tokenizer, inputs = talking
    inputs = {name: tensor[:batch] for name, tensor in inputs.items()}
    ours = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    prompts, P = unpadded(argparse.Namespace(**inputs)), inputs["input_ids"].shape[1]
    outs = mars.generate(plain, prompts, 30, **rule)
    longest = max(len(out.tokens) for out in outs)
    pad = [[tokenizer.pad_token_id] * (longest - len(out.tokens)) for out in outs]
    expected = torch.cat([inputs["input_ids"], torch.tensor([out.tokens + p for out, p in zip(outs, pad)])], 1)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=30, **rule), expected)
    assert torch.equal(ours.generate(**inputs, max_length=P + 30, **rule), expected)
    greedy = plain.generate(**inputs, max_new_tokens=30)
    assert torch.equal(greedy, expected) == (rule.get("threshold") != 0.05)
    assert max(max(out.steps) for out in outs) == (1 if rule.get("threshold") == 1 else max(max(o.steps) for o in outs))


def test_generate_of_a_checkpoint_honours_or_refuses(talking):
    """Samples, streamers, stopping criteria, pipelines and end tokens are honoured; what cannot be is one line."""
    folder, tokenizer, inputs = talking
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    plain, row = AutoModelForCausalLM.from_pretrained(folder), {n: tensor[:1] for n, tensor in inputs.items()}
    prompts, P = unpadded(inputs), inputs.input_ids.shape[1]
    sampled = model.generate(**inputs, max_new_tokens=9, do_sample=True, temperature=0.7, seed=3, threshold=1.0)
    expected = [out.tokens for out in mars.generate(plain, prompts, 9, 1.0, temperature=0.7, seed=3)]
    assert [mars.until_end(ids[P:].tolist(), mars.end_tokens(plain)) for ids in sampled] == expected
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    (ids,) = model.generate(**row, max_new_tokens=20, lossless=True, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(ids[P:])
    stops = [tokenizer.decode(ids[P + 3 : P + 5])]
    criteria = transformers.StoppingCriteriaList([transformers.StopStringCriteria(tokenizer, stops)])
    options = dict(max_new_tokens=20, stopping_criteria=criteria)
    stopped = plain.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, lossless=True, **options), stopped) and stopped[0, -1] == tokenizer.pad_token_id
    end = int(ids[P + 2])
    config = transformers.GenerationConfig(max_new_tokens=20, eos_token_id=end)
    (short,) = model.generate(**row, generation_config=config, threshold=1.0)
    assert short[P:].tolist() == mars.until_end(ids[P:].tolist(), {end}) and mars.end_tokens(model) != {end}
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = pipe(tokenizer.decode(prompts[0]), max_new_tokens=20, do_sample=False, threshold=1.0, return_full_text=False)
    assert answer["generated_text"] == tokenizer.decode(ids[P:], skip_special_tokens=True)
    for refused in (dict(num_beams=2), dict(logits_processor=[print]), dict(top_p=0.5), dict(thresold=0.9)):
        with pytest.raises(ValueError, match=f"cannot honour {next(iter(refused))}: leave it out"):
            model.generate(**inputs, **refused)


def test_a_file_of_questions_is_answered_and_learnt_from(talking, tmp_path, capsys):
    """`generate --data --out` writes a line for each answer, continues where it was stopped, and `train` takes the file."""
    folder, tokenizer, _ = talking
    data, out = tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    rows = [{k: row[k] for k in ("question", "answer")} for row in mars.toy_rows("test", 5)]
    data.write_text("\n".join(map(json.dumps, [*rows[:3], {"question": "<|end|>", "answer": "a"}, *rows[3:]])))
    command = f"generate --model {folder} --data {data} --out {out} --max-new-tokens 12 --threshold 1 --batch-size 2".split()
    mars.main(command)
    assert "5 answers" in capsys.readouterr().out
    records = [json.loads(line) for line in out.read_text().splitlines()]
    model = mars.load(folder, "cpu")[0]
    expected = mars.generate(model, [mars.chat_ids(tokenizer, mars.question_of(row)) for row in rows], 12, 1.0)
    assert sorted(r["index"] for r in records) == [0, 1, 2, 4, 5]
    for record, row, want in zip(sorted(records, key=lambda r: r["index"]), rows, expected):
        assert record["prompt"] == [{"role": "user", "content": row["question"]}] and record["steps"] == want.steps
        assert record["answer"] == tokenizer.decode(want.tokens, skip_special_tokens=True) and record["stop"] == want.stop
    lines = out.read_text().splitlines(True)
    out.write_text("".join(lines[:3]) + lines[3][:20])
    mars.main(command)
    assert "2 answers" in capsys.readouterr().out and sorted(out.read_text().splitlines(True)) == sorted(lines)
    mars.main(f"train --model {folder} --data {out} --stage ar --max-steps 1 --out {tmp_path}/out".split())
    assert "5 examples" in capsys.readouterr().out
    ((_, response),), _ = mars.encode(tokenizer, next(r for r in records if r["stop"] == "length"))
    assert response[-1] != tokenizer.eos_token_id, "an answer that was cut does not teach to stop there"
    data.write_text(json.dumps(rows[1]))
    with pytest.raises(SystemExit):
        mars.main(command)
    assert "other questions" in capsys.readouterr().err


@pytest.mark.parametrize("module", [mars, evaluation])
def test_the_script_metadata_name_the_requirements(module):
    """`uv run mars.py` installs what requirements.txt names, but for the tests."""
    metadata = re.search(r"(?m)^# dependencies = (\[.*\])$", Path(module.__file__).read_text())
    requirements = (Path(module.__file__).parent / "requirements.txt").read_text().split()
    assert json.loads(metadata[1]) == [line for line in requirements if not line.startswith("pytest")]


# -------- Evaluation: what counts as right, and how model-written code is held --------------------

NUMBERS = {  # | separates answers, ¶ is a new line
    18: r"""
        18 | 18.00 | $18 | **18** | She makes $18/day. | 18% | so 9*2=18 | (18) | ####18 | #### $18.
        #### 18 eggs per 2 days | #### 9 * 2 = 18 | #### 3¶#### 18 | #### 9 eggs x $2/egg = $18
        #### 18¶- 9 eggs x 2 | The answer is 18¶- 9 eggs¶- 2 dollars | #### 2. Add¶The answer is 18.
        #### Step 2: 5 more¶So 18 | #### Day 1 = 5 pages¶So 18 | Answer: 9 eggs * $2 = $18 | 18 m²
        To find the answer:¶1. Multiply 3*4=12¶2. So 18 eggs | The answer is about 18. And 3 is left
        \boxed{\$18}, in 7 days | \boxed{\text{18 dollars}} | \boxed{9\times2=18} | x_1 is 18
        The answer is **18**. If you have questions, answer 3 more | **Answer: 18** (9 times 2)
        The answer is \(18\). Ask me if you want the other 2 ways. | #### \(18\), 3 left
        The answer is \[18\] in 3 | \(\boxed{18}\) in 3 | The answer is \( x = 18 \). 3 ways
        **Answer:**¶18 eggs¶¶That took 3 steps. | ### Answer¶18¶¶in 3 | **Final Answer**¶¶18 (2)
        The answer is:¶¶18¶¶in 3 | Answer:¶She has 18 eggs.¶¶In 3 | Answer:¶1. Add 3 = 12¶2. So 18
        To find the answer:¶3 * 4 = 12 figs.¶Then 12 + 6 = 18. | The answer is __18__, in 3 days
        The answer is eighteen (18), in 3 days. | The answer is **ten plus eight (18)** in 3""",
    1234: r"1,234 | $1,234.00 | 1 234 | 1{,}234 | 1\,234 | 1 234 km | \boxed{1,\!234}",
    2_000_000: "2 millions | 2,000,000 | $2 Million.", 5: "10-5 | 10 - 5 | a-5",
    -5: r"-5 | $-5 | -$5 | −5 | –5 | x=-5 | (-5) | \boxed{-5} | The answer is \(-5\), 3",
    0.75: r"3/4 | .75 | 3 / 4 | ¾ | \frac{3}{4} | \boxed{\dfrac{3}{4}} | #### 3/4 cup",
    1.5: r"1 1/2 | 1½ | 1.5 | 1\frac{1}{2}", -0.5: "-1/2 | -½ | -0.50",
    None: "none | #### | eighteen | \\boxed{} | 5/0 | #### x | m² | " + "9" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_every_form_of_a_number(number):
    """GSM8K: what a careful reader takes for the answer; no answer is None, never an exception."""
    for answer in re.split(r" \| |\n +", NUMBERS[number].strip()):
        answer = answer.replace("¶", "\n")
        assert evaluation.extract_number(answer) == number, answer
        score = evaluation.score_number({"answer": f"so\n#### {number}"}, answer, None)
        assert score["correct"] == (number is not None)


PROMPT = """from typing import List

def double(x: int) -> int:
    return x * 2

def first(xs: List[int], default: int = 0) -> int:
    \'\'\' The first of xs, twice; the default where there is none.
    >>> first([3])
    6
    \'\'\'
"""
BODY = "    for x in xs:\n        return double(x)\n    return default\n"
SHORT = "def first(xs, default=0):\n" + BODY
TEST = "def check(f):\n    assert f([3, 4]) == 6\n    assert f([], 7) == 7"
PROBLEM = dict(code=PROMPT, entry_point="first", test=TEST)
FENCES = SHORT.replace(BODY, "    '''So:\n    ```\n    ~~~\n    ```python\n    '''\n")
DOUBLES = "for i in range(9):\n    TABLE.append(2 * i)\n"
ANSWERS = f"""{SHORT}
===
Sure! Here it is: ```python\n{PROMPT}{BODY}```\n\nIt doubles `x`.
===
```py\n{SHORT}\nprint(first([
===
The function:\n{SHORT}\nIt works.
===
{BODY}```\nThis returns it.
===
{BODY.lstrip()}
===
```\n{textwrap.dedent(BODY)}```
===
The body is\n{BODY}
===
1. So:\n   ```python\n{textwrap.indent(SHORT, "   ")}   ```
===
from math import prod\nThen:\n{SHORT.replace("double(x)", "prod([x, TWO])")}\nand\n```\nTWO = 2\n```
===
```\n{PROMPT}    return 5\n```\nBetter:\n```\n{SHORT}```
===
```\n{SHORT}```\nOr:\n```\ndef first(xs, default):\n    return 5\n    xs = [1,
===
```\n{SHORT}```\nNow you:\n```\n{PROMPT}    pass\n```
===
```\n{PROMPT}    pass\n```\nThe body:\n```\n{BODY}```
===
```bash\npip install x\n```\n{SHORT}
===
<|im_start|>assistant\n{SHORT}<|im_end|>\n<|im_start|>user\ndef first(xs, default=0): pass
===
```\nEND = "</s>"\n{SHORT.replace("double(x)", "double(x) if END > '<' else '<|im_end|>'")}```</s>
===
```\nfrom __future__ import (\n    annotations,\n)\nclass A:\n    def f(a: B): ...\n{SHORT}```
===
```\nfrom solution import first\nimport nowhere\n{SHORT}```
===
```\nimport functools\n@functools.wraps(double)\n{SHORT}```
===
first = lambda xs, default=0: double(xs[0]) if xs else default
===
```python\n{FENCES}{BODY}```
===
````\n{(FENCES + BODY).replace("    ", "  ")}````
===
~~~python\nFENCE = '''\n```\n'''\n{SHORT}~~~\nIt works.
===
```\nTABLE = []\n{DOUBLES}{SHORT.replace("double(x)", "TABLE[x]")}```
===
```\n{SHORT.replace("double(x)", "TABLE[x]")}```\nwith\n```\nTABLE = []\n{DOUBLES}```
===
```\n{SHORT}    first.calls += 1\nfirst.calls = 0\nimport sys\nsys.setrecursionlimit(10_000)\n```
===
```\n{SHORT}```\n```\nfrom solution import first\ndef test():\n    assert first(1) == 1\ntest()\n```
===
{SHORT}\nn = int(input())\nprint(first(n))\nassert 0\nfirst()\nraise KeyboardInterrupt\nexit()
===
{SHORT}\nwhile True: print(first([]))\nfirst = first([])\nif __name__ == "_":\n    while 1: pass
"""  # fmt: skip


def held() -> None:
    """Skip where the system cannot hold model-written code, if it has no namespaces either."""
    try:
        evaluation.check_sandbox()
    except mars.MarsError as error:
        command = "unshare --mount --map-root-user --pid --fork mount -t tmpfs tmpfs /tmp"
        if subprocess.run(command.split(), capture_output=True).returncode == 0:
            raise
        pytest.skip(str(error))


def test_the_function_is_found_in_an_answer():
    """HumanEval: every form in which an instruct model returns a function."""
    held()
    args = argparse.Namespace(run_code=True)
    for answer in ANSWERS.split("\n===\n"):
        score = evaluation.score_function(PROBLEM, answer, args)
        assert score["correct"], (answer, score)
        answer = answer.replace("default", "None")
        assert not evaluation.score_function(PROBLEM, answer, args)["correct"], answer
    for answer in ("", "I cannot.", "```", PROMPT, "(" * 500, "1+" * 5000, "\0", BODY[:20]):
        assert not evaluation.score_function(PROBLEM, answer, args)["correct"], answer
    not_run = evaluation.score_function(PROBLEM, SHORT, argparse.Namespace(run_code=False))
    assert not_run["correct"] is None
    bare = "def f(x):\n"  # without a docstring the prompt alone is no program
    for answer in ("def f(x):\n    return x", "return x"):
        exec(bare + evaluation.extract_code(answer, bare, "f"), scope := {})
        assert scope["f"](3) == 3


HOSTILE = {
    "while True: pass": "took longer", "input()": "EOFError", "import sys; sys.exit(0)": "Exit",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass": "took longer",
    "bytearray(10 * 2**30)": "MemoryError", "import ctypes; ctypes.string_at(0)": "signal 11",
    "try:\n    while True: print('x' * 10**6)\nexcept OSError: pass": "1 MB",
    "open('f', 'w').write('x' * 2**21)": "too large", "open('/etc/f', 'w')": "OSError(30",
    "[open(f'{i}', 'w').write('x' * 2**20) for i in range(65)]": "No space",
    "[open('/dev/null') for _ in range(99)]": "Too many", "raise KeyboardInterrupt": "Keyboard",
    "import socket; socket.create_connection(('1.1.1.1', 53), 1)": "unreachable",
    "import os; os._exit(0)": "ended before",
    "import os, time\nif os.fork():\n    time.sleep(0.5)\n    os._exit(0)": "ended before",
    "import os\nfor pid in (1, -1, 0):\n    try: os.kill(pid, 9)\n    except OSError: pass": "",
    "import os\nassert not os.listdir() and 'SECRET_OF_OURS' not in os.environ\n1 / 0": "ZeroDiv",
    "import ctypes, os\nassert ctypes.CDLL(None).unshare(0x10000000) == 0": "AssertionError",
    "import ctypes, time\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(9)": "took longer",
}  # fmt: skip


def test_hostile_programs_fail_alone(monkeypatch):
    """Whatever a program does, it fails for itself, is gone afterwards, and the next one runs."""
    held()
    monkeypatch.setattr(evaluation, "SECONDS", 1)
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    for program, reason in HOSTILE.items():
        error = evaluation.run_program(program)
        assert error and reason in error, (program, error)
    fork = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        "
    leave = fork + "os.execvp('sleep', ['sleep', '1234567'])\n    os._exit(0)\ntime.sleep(0.3)"
    for program in (leave, "import sys\nsys.stdout = None", "import json, random, subprocess"):
        assert evaluation.run_program(program) is None
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"1234567" in line for line in lines)
    monkeypatch.setattr(evaluation, "SANDBOX", "echo not here; exit 1")
    with pytest.raises(mars.MarsError, match="no safe way.*not here"):
        evaluation.check_sandbox()


QUESTIONS = [{k: row[k] for k in ("question", "answer")} for row in mars.toy_rows("test", 8)]


def test_problems_are_read_from_a_data_set_folder(tmp_path):
    """A saved data set is as good as a file: two rows are two problems, and --limit 1 is one."""
    code = dict(prompt="def f():\n", entry_point="f", test="def check(f): f()")
    code = [{"task_id": f"t/{i}", **code} for i in range(2)]
    for name, rows in (("gsm8k", QUESTIONS[:2]), ("humaneval", code)):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "test.parquet")
        for limit, count in ((None, 2), (1, 1)):
            args = argparse.Namespace(data=str(tmp_path), limit=limit)
            assert len(getattr(evaluation, f"{name}_problems")(args)) == count


def run_eval(capsys, command: str) -> list[dict]:
    evaluation.main(command.split())
    capsys.readouterr()
    return json.loads(Path(command.split()[-1]).read_text())["rows"]


def refused(capsys, command: str) -> str:
    """What a command complains of: one line, with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        evaluation.main(command.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("error: ")
    return error


def figures(rows: list[dict]) -> list[dict]:
    """What is the same however fast the machine is; lossless decoding chooses its pace by speed."""
    fast = {"tokens_per_second", "speedup"}
    dropped = {"lossless": fast | {"tokens_per_forward"}}
    return [{k: row[k] for k in row.keys() - dropped.get(row["mode"], fast)} for row in rows]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_interrupted_run_is_continued(checkpoint, tmp_path, capsys):
    """--resume answers only what is missing, scores what is there, and refuses other weights."""
    data, samples, model = tmp_path / "q.jsonl.gz", tmp_path / "s.jsonl", tmp_path / "model"
    data.write_bytes(gzip.compress("\n".join(map(json.dumps, QUESTIONS)).encode()))
    shutil.copytree(checkpoint, model)
    command = f"gsm8k --model {model} --data {data} --max-new-tokens 8 --batch-size 3 --baseline"
    command += f" --thresholds 1.0,0.5 --lossless --samples {samples}"
    result = f"--json {tmp_path}/a.json"
    rows = run_eval(capsys, f"{command} {result}")
    modes = [("hf", None), ("ar", 1.0), ("mars", 0.5), ("lossless", None)]
    assert [(row["mode"], row["threshold"], row["n"]) for row in rows] == [(*m, 8) for m in modes]
    assert rows[0]["speedup"] == 1 and all(row["speedup"] > 0 == row["accuracy"] for row in rows)
    lines, records = samples.read_text().splitlines(), read_lines(samples)
    assert {record["prompt"] for record in records} == {q["question"] for q in QUESTIONS}
    assert len(records) == 32 and all(sum(record["steps"]) <= 8 for record in records)
    samples.write_text("\n".join([*lines[:5], *lines[8:13], lines[13][:40]]))  # cut in mid-line
    assert figures(run_eval(capsys, f"{command} --resume {result}")) == figures(rows)
    kept = lambda records: {(r["mode"], r["threshold"], r["id"], r["completion"]) for r in records}
    assert kept(read_lines(samples)) == kept(records)
    for record in records:
        record["completion"] = QUESTIONS[int(record["id"][6:])]["answer"]
    samples.write_text("\n".join(map(json.dumps, records)))  # a saved completion is scored anew
    rows = run_eval(capsys, f"{command} --resume {result}")
    assert [row["accuracy"] for row in rows] == [1, 1, 1, 1]
    assert "--resume" in refused(capsys, command)
    assert "max_new_tokens" in refused(capsys, f"{command} --resume --max-new-tokens 9")
    data.write_bytes(gzip.compress(json.dumps(QUESTIONS[0] | {"question": "Why?"}).encode()))
    assert "another prompt" in refused(capsys, f"{command} --resume")
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "another weights" in refused(capsys, f"{command} --resume")
    assert len(read_lines(samples)) == 32
    samples.write_text("precious")
    assert "not of a samples file" in refused(capsys, f"{command} --resume")
    assert samples.read_text() == "precious"


def test_several_processes_report_what_one_does(checkpoint, tmp_path, capsys):
    """Under torchrun the ranks share the problems; the table is the same."""
    data = tmp_path / "q.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS[:5])))
    common = f"gsm8k --model {checkpoint} --data {data} --max-new-tokens 8 --thresholds 1.0,0.5"
    alone = run_eval(capsys, f"{common} --json {tmp_path}/a.json")
    command = f"-m torch.distributed.run --standalone --nproc_per_node 2 {evaluation.__file__}"
    command += f" {common} --samples {tmp_path}/b --json {tmp_path}/b.json"
    run = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert figures(json.loads((tmp_path / "b.json").read_text())["rows"]) == figures(alone)
    assert len(read_lines(tmp_path / "b")) == 10 and run.stdout.count("tokens/pass") == 1


def test_humaneval_keeps_programs_until_it_may_run_them(checkpoint, tmp_path, capsys):
    """Without --run-code programs are kept; with --resume --run-code they are scored."""
    held()
    data, samples, result = (tmp_path / name for name in ("h.jsonl", "s", "a.json"))
    data.write_text(json.dumps(PROBLEM | {"task_id": "t/0", "prompt": PROMPT}))
    command = f"humaneval --model {checkpoint} --data {data} --max-new-tokens 4 --thresholds 1.0"
    (row,) = run_eval(capsys, f"{command} --samples {samples} --json {result}")
    assert row["accuracy"] is None and row["n"] == 1
    samples.write_text(json.dumps(read_lines(samples)[0] | {"completion": SHORT}))
    for more in ("--run-code", ""):  # a verdict stays
        (row,) = run_eval(capsys, f"{command} --samples {samples} --resume {more} --json {result}")
        assert row["accuracy"] == 1 and read_lines(samples)[0]["correct"] is True


@pytest.mark.parametrize("command, complaint", [
    ("arc", "arc"), ("gsm8k --data {tmp}/none.jsonl", "no data"), ("load --rates 0", "rates"),
    ("gsm8k --data {tmp}/empty.jsonl", "empty"), ("gsm8k --data {tmp}/columns.jsonl", "'answer'"),
    ("humaneval --run-code --data {tmp}/ok.jsonl", "'task_id'"), ("load --rates nan", "--rates"),
    ("gsm8k --data {tmp}/bad.gz", "end-of-stream"), ("gsm8k --data {tmp}/ok.jsonl --limit 0", "at least"),
    ("gsm8k --data {tmp}/ok.jsonl --model {tmp}/plain", "no chat template"),
    ("toy --resume", "--samples"),
    ("gsm8k --data {tmp}/ok.jsonl --thresholds 0.5,2", "out of"), ("toy --plot a.txt", ".png"),
    ("gsm8k --data {tmp}/reference.jsonl", "number"), ("toy --json {tmp}/no/x.json", "no folder"),
    ("humaneval --data {tmp}/h.jsonl", "--run-code"),
])  # fmt: skip
def test_a_bad_evaluation_writes_nothing(command, complaint, checkpoint, tmp_path, capsys):
    """Unknown task, missing or empty data, missing fields (named), no chat template, no folder."""
    problem = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), "a")
    texts = {"empty": "\n", "columns": '{"question": "a"}', "ok": json.dumps(QUESTIONS[0])}
    texts |= {"reference": '{"question": "a", "answer": "b"}', "h": json.dumps(problem)}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    shutil.copytree(checkpoint, tmp_path / "plain")
    (tmp_path / "plain/chat_template.jinja").unlink()
    (tmp_path / "result.json").write_text("precious")
    task, *words = command.format(tmp=tmp_path).split()
    options = ["--model", checkpoint, "--json", tmp_path / "result.json", *words]
    assert complaint in refused(capsys, " ".join(map(str, [task, *options])))
    assert (tmp_path / "result.json").read_text() == "precious"


def test_the_frontier_is_drawn_where_matplotlib_is(checkpoint, tmp_path, capsys, monkeypatch):
    """--plot needs matplotlib, and says so at once."""
    command = f"toy --model {checkpoint} --limit 4 --max-new-tokens 4 --plot {tmp_path}/f.png"
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "find_spec", lambda name: None)
        assert "pip install matplotlib" in refused(capsys, command)
    pytest.importorskip("matplotlib")
    evaluation.main(command.split())
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_policies_under_load(checkpoint, tmp_path, capsys):
    """Requests at random get the answers that they would get alone; τ falls in a queue."""
    command = f"load --model {checkpoint} --limit 12 --max-new-tokens 6 --batch-size 2"
    rows = run_eval(capsys, f"{command} --rates 0.1,50 --json {tmp_path}/l.json")
    cells = [(row["load"], row["policy"]) for row in rows]
    assert cells == [(load, policy) for load in (0.1, 50) for policy in evaluation.POLICIES]
    for row in rows:
        assert 0 < row["latency_p50"] <= row["latency_p95"] and row["throughput"] > 0
    taus = dict(zip(cells, (row["mean_threshold"] for row in rows)))
    assert taus[50, "fixed-1.0"] == 1 and taus[50, "fixed-0.9"] == 0.9
    assert taus[50, "lossless"] is None and 0.9 <= taus[50, "adaptive"] < 0.99
    assert 0.99 < taus[0.1, "adaptive"] <= 1
    assert len(run_eval(capsys, f"{command} --limit 1 --json {tmp_path}/l.json")) == 12
    model, tokenizer = mars.load(checkpoint)
    texts = [mars.chat_ids(tokenizer, mars.messages_of(row)[:-1]) for row in QUESTIONS]
    alone = [out.tokens for out in mars.generate(model, texts, 6, 1.0, batch_size=1)]
    for policy in ("fixed-1.0", "lossless"):
        args = argparse.Namespace(max_new_tokens=6, batch_size=3)
        due = [0.01 * i for i in range(len(texts))]
        latencies, outs, _ = evaluation.serve(model, texts, due, policy, args)
        assert outs == alone and min(latencies) > 0


def worker(folder: Path, checkpoint: str) -> None:
    """One of two processes that torchrun has started: what they find goes to the folder."""
    for name, more in (("copies", ""), ("shards", "--shard --gradient-checkpointing")):
        train_chats(checkpoint, folder, f"--out {folder}/{name} {more}")
    write = mars.write_checkpoint

    def interrupted(*args):
        write(*args)
        raise RuntimeError("power cut")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(mars, "write_checkpoint", interrupted)
        train_chats(checkpoint, folder, f"--out {folder}/half --max-steps 20 --save-every 10 --shard")
    mars.CHUNK = 5 * V  # logits are made in chunks, and once more going backward
    for way, (batch_size, accumulate, shard) in WAYS_OF_TWO.items():
        for block_size in (1, B):
            found = five_steps(block_size, batch_size, accumulate, shard)
            if mars.processes()[0] == 0:
                torch.save(found, folder / f"{way}-{block_size}.pt")


if __name__ == "__main__":
    with mars.process_group("cpu"):
        worker(Path(sys.argv[1]), sys.argv[2])
