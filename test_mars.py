"""The method, one sentence a test. Tiny random models, no downloads: `python -m pytest -q`."""

import argparse
import contextlib
import copy
import functools
import gzip
import itertools
import json
import math
import multiprocessing
import multiprocessing.forkserver
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

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
torch.set_num_threads(1)  # the models are so small that a second thread only waits
transformers.utils.logging.disable_progress_bar()

B, V, MASK, ENDS = 4, 61, 60, {1, 13}

SLIDING = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
KINDS = {  # the kinds of models, and what is special about each
    "qwen2": {}, "llama": {}, "phi3": {}, "smollm3": {}, "gpt_neox": {}, "gemma": dict(head_dim=8),
    "qwen2 sliding": SLIDING | dict(use_sliding_window=True), "mistral": dict(sliding_window=7),
    "gemma3_text": SLIDING | dict(head_dim=8, final_logit_softcapping=3.0),
    "qwen3": dict(tie_word_embeddings=False), "phi": dict(resid_pdrop=0.1),
    "cohere": dict(logit_scale=0.3), "granite": dict(logits_scaling=3.0),
}  # fmt: skip


@functools.cache
def tiny(kind="qwen2", **options):
    """A random model that is sure of some tokens and unsure of others."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    sizes |= dict(initializer_range=0.5, tie_word_embeddings=True)
    sizes |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0) | KINDS.get(kind, {})
    config = transformers.AutoConfig.for_model(kind.split()[0], **sizes | options)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    model.config.mars_block_size, model.config.mars_mask_token_id = B, MASK
    ends = dict(eos_token_id=sorted(ENDS), pad_token_id=0, suppress_tokens=[MASK])
    model.generation_config = transformers.GenerationConfig(**ends)
    return model


@torch.no_grad()
def plain(model, ids):
    """Logits [T, V] of a text alone."""
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]


def prompts(n, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, MASK) for _ in range(rng.randint(1, 23))] for _ in range(n)]


def examples(n, seed=0):
    rng, texts = random.Random(seed), prompts(2 * n, seed=seed)
    return [(p, r, rng.randrange(B)) for p, r in zip(texts[::2], texts[1::2])]


def tokens_of(outs):
    return [out.tokens for out in outs]


def counts_of(outs):
    return {n for out in outs for n in out.steps}


# -------- Training --------------------------------------------------------------------------------


def test_attention_mask_is_the_one_that_is_drawn():
    """The drawing in the docstring is what the code computes."""
    drawn = re.findall("[■·]", mars.attention_mask.__doc__)
    assert mars.attention_mask(2, 5, 3).flatten().tolist() == [cell == "■" for cell in drawn]


def test_a_hand_worked_row():
    """The mask at index i stands at position P+i and predicts x_{i+1}; position p predicts p+1."""
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
    assert torch.equal(rows["visible"][1, 0, 4:], torch.eye(10).bool()[4:]), "padding sees itself"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_the_decoder_runs(kind):
    """A mask predicts what the model does behind the text before its block and the masks so far."""
    model, batch = tiny(kind), examples(6)
    rows = {name: x.to(model.device) for name, x in mars.collate(batch, B, MASK).items()}
    with torch.no_grad():
        logits = mars.project(model, mars.last_hidden(model, rows))
    for row, (prompt, response, phase) in zip(logits, batch):
        expected = [*plain(model, prompt + response)]
        for i, s in zip(*(x.tolist() for x in mars.noisy_stream(len(response), B, phase))):
            expected.append(plain(model, prompt + response[:s] + [MASK] * (i - s + 1))[-1])
        expected = torch.stack(expected)
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-4, rtol=1e-5)
        assert torch.equal(row[: len(expected)].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("block_size", [1, B])
def test_the_loss_is_the_sum_of_two_means(block_size):
    """L = L_mask + ar_weight · L_AR, each the mean over its targets (Eq. 5)."""
    model, ar, masked = tiny(), [], []
    batch = [(prompt, x, phase % block_size) for prompt, x, phase in examples(4)]
    nll = lambda text, label: -plain(model, text)[-1].log_softmax(-1)[label].item()
    for prompt, x, phase in batch:
        ar += [nll(prompt + x[:i], label) for i, label in enumerate(x)]
        for i in range(len(x) - 1):
            s = max(0, (i + phase) // block_size * block_size - phase)
            if i - s < block_size - 1:
                masked.append(nll(prompt + x[:s] + [MASK] * (i - s + 1), x[i + 1]))
    loss, parts = mars.mars_loss(model, batch, block_size, MASK, 0.5)
    expected = 0.5 * sum(ar) / len(ar) + sum(masked) / max(1, len(masked))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert parts["nll"].sum().item() == pytest.approx(sum(ar + masked), rel=1e-5)
    assert parts["count"][0] == len(ar) and parts["count"].sum() == len(ar) + len(masked)


def test_the_vocabulary_is_projected_to_in_chunks(monkeypatch):
    """With 150,000 ids a training step takes less than a third of the memory."""
    options = dict(vocab_size=150_000, hidden_size=16, num_hidden_layers=1, initializer_range=0.02)
    model, used = tiny(**options), []
    for chunk in (mars.CHUNK, 2**40):
        monkeypatch.setattr(mars, "CHUNK", chunk)
        before = mars.peak_memory(model.device, reset=True)
        mars.mars_loss(model, [([5] * 8, [6] * 256, 0)] * 2, B, 7)[0].backward()
        used.append(mars.peak_memory(model.device) - before)
        model.zero_grad()
    assert math.isnan(used[0]) or used[1] > 3 * used[0] > 300, used


def test_every_alignment_of_blocks_is_practised():
    """Order and phase follow from (seed, visit, example) alone, and phases take every value."""
    data = [([i], [i]) for i in range(100)]
    take = lambda *options: list(itertools.islice(mars.visits(data, B, *options), 200))
    seen = take(False, 0)
    assert seen == take(False, 0) != take(False, 1) and seen[:100] != seen[100:]
    assert sorted(prompt for prompt, *_ in seen[:100]) == [[i] for i in range(100)]
    assert {phase for *_, phase in seen} == set(range(B))
    assert {phase for *_, phase in take(True, 0)} == {0}


def test_dropout_differs_from_step_to_step():
    """Random numbers are new at each step, even where nothing else changes."""
    training = mars.Training(copy.deepcopy(tiny("phi")), 4, lr=0.0)
    reports = mars.train(training, [([5], [6, 7])], block_size=2, mask_id=MASK, batch_size=1)
    assert len({float(report["nll"][0]) for report in reports}) == 4


def train_chats(model, out, options=""):
    """`mars.py train` on 30 toy problems, some of them longer: 15 steps of each stage."""
    data, rows = Path(model) / "chats.jsonl", mars.toy_rows("train", 30)
    if not data.exists():
        rows = [row | {"question": row["question"] * (1 + i % 3)} for i, row in enumerate(rows)]
        data.write_text("\n".join(map(json.dumps, rows)))
    command = f"train --model {model} --data {data} --out {out} --batch-size 2 --lr 1e-3"
    mars.main(f"{command} --device cpu {options}".split())


def at_checkpoint(monkeypatch, stage, step, act):
    """Do something as soon as the checkpoint of this step is written."""
    write = mars.write_checkpoint

    def write_and_act(training, tokenizer, folder, settings):
        write(training, tokenizer, folder, settings)
        if (folder.stem, training.step) == (stage, step):
            act()

    monkeypatch.setattr(mars, "write_checkpoint", write_and_act)


def five_steps(batch_size, accumulate, shard=False):
    """The gradient of the first step before it is clipped, and the losses of five steps."""
    training, gradients = mars.Training(copy.deepcopy(tiny()).cpu(), 5, 1e-2, shard), []
    whole = lambda x: (x.full_tensor() if shard else x).flatten()
    keep = lambda *_: gradients.append([whole(p.grad) for p in training.loss.parameters()])
    training.optimizer.register_step_pre_hook(keep)
    data = [(p * (1 + 5 * (i % 3)), r) for i, (p, r, _) in enumerate(examples(20))]
    split = dict(batch_size=batch_size, accumulate=accumulate)
    reports = list(mars.train(training, data, block_size=B, mask_id=MASK, **split))
    losses = [report["nll"].sum() / report["count"].sum() for report in reports]
    return torch.cat(gradients[0]) * reports[0]["grad_norm"], torch.stack(losses)


@pytest.fixture(scope="module")
def spawn():
    """Starts a function in a process of its own, on the CPU, in which everything is imported."""
    context = multiprocessing.get_context("forkserver")
    slow = ["torch._dynamo", "transformers.models.phi.modeling_phi"]
    context.set_forkserver_preload([__name__, *slow])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        multiprocessing.forkserver.ensure_running()

    def start(function, *args):
        child = context.Process(target=function, args=args)
        child.start()
        return child

    return start


def worker(rank, folder, checkpoint):
    """One of two processes that train together; leaves what they find in the folder."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    stop = lambda: rank and signal.raise_signal(signal.SIGTERM)
    at_checkpoint(pytest.MonkeyPatch(), "mars", 3, stop)
    options = "--stage mars --max-steps 6 --save-every 3 --shard --gradient-checkpointing"
    with pytest.raises(SystemExit):
        train_chats(checkpoint, folder / "shares", options)
    mars.CHUNK = 5 * V  # logits are computed in chunks, and again in the backward pass
    for shard in (False, True):
        torch.save(five_steps(2, 2, shard), folder / f"{shard}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(spawn, checkpoint, tmp_path_factory):
    """The folder in which two processes have left what they find, beside the run of one."""
    folder = tmp_path_factory.mktemp("two")
    train_chats(checkpoint, folder / "one", "--stage mars --max-steps 6 --batch-size 4")
    for child in [spawn(worker, rank, folder, checkpoint) for rank in range(2)]:
        child.join(300)
        child.kill()
        assert child.exitcode == 0
    return folder


@pytest.mark.parametrize("way", ["micro-batches", "copies", "shares"])
def test_the_same_gradient_however_a_step_is_split(way, two_processes):
    """A batch of 8 or parts of it: the same gradient, to 1e-5 of its norm, and the same losses."""
    gradient, losses = five_steps(8, 1)
    file = two_processes / f"{way == 'shares'}-0.pt"
    split, same = five_steps(1, 8) if way == "micro-batches" else torch.load(file)
    torch.testing.assert_close(split, gradient, atol=1e-5 * gradient.norm(), rtol=0)
    torch.testing.assert_close(same, losses, atol=1e-4, rtol=1e-4)
    assert losses[-1] < 0.9 * losses[0], "it learns"


def test_one_process_finishes_what_two_have_begun(two_processes, checkpoint):
    """A signal to one stops both, and their shares of weights and optimiser make a whole."""
    options = "--stage mars --max-steps 6 --batch-size 4 --resume"
    assert (two_processes / "shares/mars.partial").exists()
    train_chats(checkpoint, two_processes / "shares", options)
    one, two = (mars.load(two_processes / name / "mars", "cpu")[0] for name in ("one", "shares"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A checkpoint that draws random numbers when it is trained."""
    folder = tmp_path_factory.mktemp("phi")
    _, tokenizer = mars.toy_model()
    options = dict(vocab_size=len(tokenizer), resid_pdrop=0.2, initializer_range=0.02)
    mars.save(tiny("phi", **options), tokenizer, folder, 1, tokenizer.mask_token_id)
    return folder


@pytest.fixture(scope="module")
def whole(dropping, tmp_path_factory):
    """A run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    train_chats(dropping, out)
    return out


def state_of(out):
    """The model of both stages."""
    files = [file for stage in ("ar", "mars") for file in out.glob(f"{stage}/[!t]*")
             if file.is_file()]
    return {file.relative_to(out): hash(file.read_bytes()) for file in files}


def checkpoints(out):
    """What --resume may go on from: each can be loaded."""
    folders = [file.parent for file in out.glob("*/training.json") if file.parent.suffix != ".new"]
    return [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]


def training_refused(capsys, model, out, options="", status=2):
    """The error with which training ends."""
    with pytest.raises(SystemExit) as stop:
        train_chats(model, out, options)
    assert stop.value.code == status
    return capsys.readouterr().err


@pytest.mark.parametrize("stage, step, act, status", [
    ("mars", 10, lambda: sys.exit("power cut"), "power cut"),
    ("mars", 5, lambda: signal.raise_signal(signal.SIGTERM), 130),
    ("ar", 15, lambda: signal.raise_signal(signal.SIGINT), 130),  # with the last checkpoint
])  # fmt: skip
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    stage, step, act, status, dropping, whole, tmp_path, monkeypatch, capsys
):
    """Weights, optimiser, schedule, order and random numbers go on exactly, whatever stopped it."""
    at_checkpoint(monkeypatch, stage, step, act)
    training_refused(capsys, dropping, tmp_path, "--save-every 5", status)
    monkeypatch.undo()
    assert "--resume" in training_refused(capsys, dropping, tmp_path, f"--stage {stage}")
    train_chats(dropping, tmp_path, "--resume")
    assert state_of(tmp_path) == state_of(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"ar", "mars"}


def test_a_run_goes_on_with_its_own_settings(dropping, checkpoint, whole, tmp_path, capsys):
    """Another rate, data or start is refused, and another model overwrites nothing."""
    data = tmp_path / "chats.jsonl"
    data.write_text((dropping / "chats.jsonl").read_text().replace("has", "had"))
    resume = functools.partial(training_refused, capsys, dropping, whole)
    assert "trained with lr 0.001, not 0.5" in resume("--resume --lr 0.5")
    assert "trained with data 30 examples" in resume(f"--resume --data {data}")
    assert "trained with model" in resume("--resume --stage mars"), "it began at the model of AR"
    assert "name another --out" in training_refused(capsys, checkpoint, whole)


def test_whenever_it_is_killed_it_can_be_resumed(spawn, dropping, whole, tmp_path):
    """After 20 SIGKILLs at random moments it ends as if nothing had happened."""
    rng, kills, ended = random.Random(0), 0, False
    written = lambda: {file.inode() for file in os.scandir(tmp_path) if "partial" in file.name}
    while kills < 20 or not ended:
        if ended:  # so soon? then the same again
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
        before = written()
        child = spawn(train_chats, dropping, tmp_path, "--save-every 1 --resume")
        while child.is_alive() and written() == before:
            time.sleep(0.001)
        child.join(rng.uniform(0, 0.1) if kills < 20 else None)
        child.kill()
        child.join()
        ended = child.exitcode == 0
        kills += child.exitcode == -signal.SIGKILL
        assert state_of(tmp_path) == state_of(whole) if ended else checkpoints(tmp_path)


@pytest.mark.parametrize("call", range(14))
def test_dying_while_it_writes_leaves_a_checkpoint(call, dropping, whole, tmp_path, monkeypatch):
    """Whichever call of writing and replacing folders is its last, --resume goes on exactly."""
    calls = itertools.count()

    def dying(done):
        last = lambda: next(calls) == call and sys.exit("dead")  # no `except Exception` stops it
        return lambda *args, **options: last() or done(*args, **options)

    for place, name in ((mars, "save"), (torch, "save"), (Path, "rename"), (shutil, "rmtree")):
        monkeypatch.setattr(place, name, dying(getattr(place, name)))
    with pytest.raises(SystemExit, match="dead"):
        train_chats(dropping, tmp_path, "--save-every 10")
    monkeypatch.undo()
    assert checkpoints(tmp_path) or call < 4, "the first is there before the fifth call"
    train_chats(dropping, tmp_path, "--resume")
    assert state_of(tmp_path) == state_of(whole)


@pytest.mark.parametrize("room", [10_000, 60_000])
def test_a_full_disk_is_one_line(room, dropping, tmp_path, monkeypatch, capsys):
    """What could not be written whole is not there, and what was there still is."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    at_checkpoint(monkeypatch, "ar", 5, fill)
    try:
        error = training_refused(capsys, dropping, tmp_path, "--save-every 5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.startswith("error: cannot write") and error.count("\n") == 1
    assert "--resume continues from" in error and len(checkpoints(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ar.partial"]


def test_a_gradient_that_is_not_finite_ends_training(dropping, tmp_path, capsys):
    """One line says so, and what is on disk is finite."""
    assert "lower --lr" in training_refused(capsys, dropping, tmp_path, "--save-every 1 --lr 1e30")
    (model,) = checkpoints(tmp_path)
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_the_first_step_trains():
    """Warm-up takes 3 % of the steps and never begins at 0."""
    assert mars.Training(tiny(), 1, 1.0).schedule.get_last_lr() == [1.0]
    assert mars.Training(tiny(), 100, 1.0).schedule.get_last_lr() == [pytest.approx(1 / 3)]


def test_with_gradient_checkpointing_layers_run_twice(dropping, whole, tmp_path, monkeypatch):
    """They keep little for the backward pass, and the outcome is the same, dropout included."""
    layer, runs = transformers.models.phi.modeling_phi.PhiMLP, []
    forward = layer.forward
    count = lambda self, x: runs.append(self.training) or forward(self, x)
    monkeypatch.setattr(layer, "forward", count)
    train_chats(dropping, tmp_path, "--gradient-checkpointing")
    assert sum(runs) == 2 * 30 * 2, "twice 30 steps through two layers"
    assert state_of(tmp_path) == state_of(whole)


# -------- Decoding --------------------------------------------------------------------------------


@functools.cache
def naive(model, prompt, *options):
    return mars.naive_generate(model, list(prompt), *options)


def check(model, texts, outs, thresholds, max_new_tokens, block_size=B):
    """Every row is what the naive decoder makes of it alone, pass by pass."""
    for prompt, out, threshold in zip(texts, outs, thresholds, strict=True):
        assert out == naive(model, tuple(prompt), max_new_tokens, threshold, block_size)
        assert MASK not in out.tokens and not ENDS & {*out.tokens[:-1]}


@pytest.mark.parametrize("batch_size, block_size", [(1, B), (3, B), (8, B), (3, 3), (3, 2)])
def test_the_fast_decoder_is_the_naive_one(batch_size, block_size):
    """Cached equals uncached, and a row in a batch the row alone, for blocks up to the trained."""
    texts, options = prompts(12), dict(batch_size=batch_size, block_size=block_size)
    seen = set()
    for threshold in (0.9, 0.5, 0.2):
        outs = mars.generate(tiny(), texts, 50, threshold, **options)
        check(tiny(), texts, outs, [threshold] * 12, 50, block_size)
        seen |= {out.stop for out in outs} | counts_of(outs)
    assert seen == {"eos", "length", *range(1, block_size + 1)}, "ends and acceptance should vary"


@pytest.mark.parametrize("kind", KINDS)
def test_every_usual_kind_of_model_is_trained_and_decoded(kind):
    """After a step of training, τ = 1 and lossless are Hugging Face's greedy output."""
    model, texts, data = copy.deepcopy(tiny(kind)), prompts(8, seed=2), [e[:2] for e in examples(4)]
    training, before = mars.Training(model, 1, 1e-3), copy.deepcopy(model)
    (report,) = mars.train(training, data, block_size=B, mask_id=MASK, batch_size=4)
    assert 0 < report["grad_norm"] < math.inf
    assert not any(map(torch.equal, model.parameters(), before.parameters()))
    greedy = mars.hf_generate(model, texts, 40, 1)
    decode = functools.partial(mars.generate, model, texts, 40, batch_size=5)
    assert decode(1.0) == greedy and tokens_of(decode(lossless=True)) == tokens_of(greedy)
    thresholds = [0.3, 0.03] * 4  # soft caps and scales make a model less sure
    outs = decode(thresholds)
    check(model, texts, outs, thresholds, 40)
    assert {1, B} <= counts_of(outs) and len({tuple(out.tokens) for out in greedy}) > 4


@pytest.mark.parametrize("threshold, masks", [(1.0, 0), (0.4, B - 1)])
def test_threshold_one_reads_no_masks_and_finished_rows_cost_nothing(threshold, masks):
    """A row at τ = 1 is fed a token a pass, and only rows that are still being decoded are fed."""
    mars.check_model(tiny())  # once a model: not to be counted
    fed, texts = [], prompts(9, seed=3)
    count = lambda _, args, options: fed.append(options["input_ids"].shape)
    hook = tiny().register_forward_pre_hook(count, with_kwargs=True)
    outs = mars.generate(tiny(), texts, 30, threshold, batch_size=4)
    hook.remove()
    assert sum(n for n, _ in fed) == sum(len(out.steps) for out in outs)
    widths = {q - masks for _, q in fed} - {len(prompt) for prompt in texts}
    assert widths <= set(range(1, masks + 2))
    assert sum(n for n, q in fed if q > 2 * B) <= len(texts), "a prompt is read once, by itself"


def test_thresholds_per_request_and_on_the_fly():
    """The knob may differ from row to row, or turn while it runs; a row at τ = 1 stays AR."""
    texts, thresholds = prompts(6), [1.0, 0.2, 0.9, 1.0, 0.5, 0.05]
    outs = mars.generate(tiny(), texts, 40, thresholds, batch_size=3)
    check(tiny(), texts, outs, thresholds, 40)
    knob = iter([1.0, 1.0, 0.05, 0.05, 1.0, 0.05] + [1.0] * 99)
    (out,) = mars.generate(tiny(), texts[4:5], 20, lambda: next(knob))
    assert out.steps[:5] == [1, 1, B, B, 1] and set(out.steps[6:]) == {1}


def test_a_row_ends_at_the_end_of_the_window():
    """Decoding stops at the model's context window, and masks beyond it disturb nothing."""
    model, prompt = tiny(max_position_embeddings=16), [5, 6, 7, 8, 9, 10]
    (out,) = mars.generate(model, [prompt], 256, 0.3)
    assert len(out.tokens) == 10 and out.stop == "length"
    check(model, [prompt], [out], [0.3], 10)


def test_requests_may_arrive_while_it_runs():
    """An iterator is asked before every pass and may answer None; no row depends on its company."""
    texts, options = prompts(7), dict(max_new_tokens=25, threshold=0.4, temperature=1.0)

    def arrivals():
        for prompt, wait in zip(texts, [3, 0, 0, 9, 1, 30, 0]):
            yield from [None] * wait
            yield prompt

    tokens = [[] for _ in texts]
    for index, new in mars.stream(tiny(), arrivals(), batch_size=3, **options):
        tokens[index] += new
    assert tokens == tokens_of(mars.generate(tiny(), texts, **options))
    assert tokens != tokens_of(mars.generate(tiny(), texts, seed=1, **options))


def test_sampling_has_the_exact_distribution():
    """20,000 draws of three tokens fit the model's joint probabilities: chi-square at p = 0.001."""
    model, n = tiny(vocab_size=4, initializer_range=0.15), 20_000
    model.generation_config = transformers.GenerationConfig(suppress_tokens=[3])
    expected = []
    for triple in itertools.product(range(3), repeat=3):
        p = plain(model, [1, 2, *triple])[1:4, :3].softmax(-1)
        expected.append(n * math.prod(float(p[i, token]) for i, token in enumerate(triple)))
    outs = mars.generate(model, [[1, 2]] * n, 3, 1.0, temperature=1.0, batch_size=1000)
    counts = (torch.tensor(tokens_of(outs)) @ torch.tensor([9, 3, 1])).bincount(minlength=27)
    expected = torch.tensor(expected)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 54.05 and expected.min() > 5  # 26 degrees of freedom


@pytest.mark.parametrize("metric, value, ar, loose", [
    ("probability", 0.5, 1.0, 1e-9), ("margin", 0.2, 1.0, 1e-9), ("entropy", -1.0297, 0.0, 99.0),
])  # fmt: skip
def test_the_three_metrics(metric, value, ar, loose):
    """Top probability, margin of the top two, entropy in nats; one threshold of each is AR."""
    surety = mars.confidence(torch.tensor([0.5, 0.3, 0.2]).log(), metric)
    assert surety.item() == pytest.approx(value, abs=1e-4)
    decode = lambda threshold: mars.generate(tiny(), prompts(4), 20, threshold, metric=metric)
    assert counts_of(decode(ar)) == {1}
    assert {n for out in decode(loose) for n in out.steps[:-1]} == {B}
    assert {1, 2} <= counts_of(decode(0.4))


def test_a_hand_worked_pass_over_the_cache():
    """The last two tokens, a draft, a mask M behind the text and a mask m behind the draft."""
    cache = mars.SlotCache(3, 99)
    # lines 1 and 2 of the cache; the first row has one token, and a pad in the spare slot
    positions, seen = cache.prepare(1, [1, 4], back=2, drafts=1, masks=1, device="cpu")
    S = cache.size
    slots = [[S - 1, 0, 1, 2, 3], [S + 2, S + 3, S + 4, S + 5, S + 6]]
    assert positions.tolist() == [[0, 0, 1, 1, 2], [2, 3, 4, 4, 5]]
    assert (cache.target.view(2, 5) - S).tolist() == slots
    assert seen[1, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],  # x2
        [1, 1, 1, 1, 0, 0, 0],  # x3
        [1, 1, 1, 1, 1, 0, 0],  # the draft
        [1, 1, 1, 1, 0, 1, 0],  # M
        [1, 1, 1, 1, 1, 0, 1],  # m
    ]


def walks(n, length=5, seed=0):
    """Token sequences in which the next is a function of the last, or now and then anything."""
    rng, walk = random.Random(seed), [2]
    while len(walk) < n * length:
        known = 2 + (7 * walk[-1] + 3) % (MASK - 2)
        walk.append(known if rng.random() < 0.9 else rng.randrange(2, MASK))
    return [walk[i : i + length] for i in range(0, n * length, length)]


@functools.cache
def drafter(block_size=B):
    """A tiny model that has learnt walks: many of its drafts are right and many are not."""
    config = tiny().config.to_dict() | dict(initializer_range=0.05, mars_block_size=block_size)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).to(DEVICE)
    model.generation_config = tiny().generation_config
    data = [(walk[:3], walk[3:]) for walk in walks(400, 24)]
    options = dict(block_size=block_size, mask_id=MASK, batch_size=16)
    list(mars.train(mars.Training(model, 150, 1e-2), data, **options))
    return model


@pytest.fixture
def any_plan(monkeypatch):
    """Draws plan and number of masks before every pass: no test depends on the machine's speed."""
    rng = random.Random(0)

    def choose(self, rows, drafts):
        self.plan = rng.choice(self.PLANS)
        return rng.randint(0, self.most)

    monkeypatch.setattr(mars.DraftScheduler, "choose", choose)


@pytest.fixture
def at_once(monkeypatch):
    """All drafts in every pass, whatever the machine's speed."""
    monkeypatch.setattr(mars.DraftScheduler, "choose", lambda self, rows, drafts: self.most)


@pytest.mark.parametrize("rule", [dict(threshold=0.3), dict(lossless=True)])
def test_stale_cache_slots_are_never_seen(rule, monkeypatch, at_once):
    """Poison in every slot that no committed token has written changes nothing."""
    prepare = mars.SlotCache.prepare
    decode = lambda: mars.generate(drafter(), walks(6), 40, batch_size=3, **rule)

    def poison(self, first, lengths, back, *rest):
        for line, length in enumerate(lengths, first):
            for buffer in itertools.chain(*self.layers):
                buffer[line, max(length - back, 0) :] = 1e4
        return prepare(self, first, lengths, back, *rest)

    clean = decode()
    monkeypatch.setattr(mars.SlotCache, "prepare", poison)
    assert decode() == clean


@pytest.mark.parametrize("block_size, temperature", [(2, 0.7), (4, 0.0), (4, 1.0), (8, 0.0)])
def test_lossless_output_is_that_of_ar_decoding(block_size, temperature, any_plan):
    """Only what AR decoding chooses is committed, greedy or sampled, with however many drafts."""
    model, texts = drafter(block_size), [w[: 1 + i % 5] for i, w in enumerate(walks(16, seed=1))]
    decode = functools.partial(mars.generate, model, texts, temperature=temperature)
    ar = decode(30, 1.0, batch_size=1)
    for batch_size in (1, 4, 16):
        outs = decode(30, lossless=True, batch_size=batch_size)
        assert [(out.tokens, out.stop) for out in outs] == [(out.tokens, out.stop) for out in ar]
        assert counts_of(outs) >= set(range(1, min(block_size, 4) + 1))
    cut = decode(3, lossless=True)
    assert tokens_of(cut) == [tokens[:3] for tokens in tokens_of(ar)]


def test_drafts_continue_from_the_last_that_was_accepted(at_once):
    """The drafts are what masks predict behind all that is committed but the newest token."""
    model, texts = drafter(), walks(12, seed=2)
    outs = mars.generate(model, texts, 24, lossless=True, batch_size=5)
    for text, out, ar in zip(texts, outs, mars.generate(model, texts, 24, 1.0)):
        done, drafts = 0, []
        for count in out.steps:
            right = [a == b for a, b in zip(drafts, ar.tokens[done:-1])]
            assert count == 1 + [*right, False].index(False)
            done += count
            ids = text + ar.tokens[: done - 1] + [MASK] * (B - 1)
            drafts = plain(model, ids)[1 - B :, :MASK].argmax(-1).tolist()
    assert {1, B} < counts_of(outs)


@pytest.mark.parametrize("text, drafts", [
    ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [7, 2, 3]), ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2]),
    ([2, 3, 7, 1, 2, 3], [7, 1, 2]), ([5, 5, 5], [5]), ([1, 2, 3, 4, 3], []), ([1], []),
])  # fmt: skip
def test_drafts_may_come_from_the_text_so_far(text, drafts):
    """What followed the last three tokens, else two, where they last occurred, by that plan."""
    scheduler = mars.DraftScheduler(3)
    assert scheduler.drafts(text) == []
    scheduler.plan = "text"
    assert scheduler.drafts(text) == drafts


def test_the_fastest_plan_is_followed_and_the_others_are_tried():
    """The plan with the most tokens per second gets nearly all passes, for each number of rows."""
    scheduler = mars.DraftScheduler(3)
    for rows, *speeds in ((1, 90, 80, 50, 40), (1, 20, 80, 95, 40), (16, 20, 30, 25, 40)):
        taken, speed = [], dict(zip(scheduler.PLANS, speeds))
        for i in range(2048):
            masks = scheduler.choose(rows, i % 2)
            assert masks == {"at once": 3, "in turns": 0 if i % 2 else 3}.get(scheduler.plan, 0)
            taken.append(scheduler.plan)
            scheduler.record(rows, speed[scheduler.plan], 1.0)
        assert taken[1024:].count(max(speed, key=speed.get)) > 0.9 * 1024


# -------- Data ------------------------------------------------------------------------------------


def test_toy_problems_are_disjoint_and_solvable():
    """No test problem is a training problem, and only the right answer counts as right."""
    held_out = mars.toy_rows("test", 500)
    assert {r["key"] for r in held_out}.isdisjoint(r["key"] for r in mars.toy_rows("train", 3000))
    for row in held_out:
        assert evaluation.score_number(row, row["answer"], None)["correct"]
        assert not evaluation.score_number(row, row["answer"] + "1", None)["correct"]


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"
CALLS = "{% for c in m.tool_calls %}<{{ c.name }} {{ c.arguments | tojson }}>{% endfor %}</s>"
TEMPLATES = {  # the ways of well-known ones
    "chatml": "{% if tools %}{{ tools | tojson }}{% endif %}{% if messages[0].role != 'system' %}"
    "[system]Help.</s>\n{% endif %}" + TURNS.replace("</s>", CALLS) + ASK,
    "bos": "{{ bos_token }}" + TURNS + ASK,
    "strict": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}" + TURNS.replace("</s>", "<|stop|>") + ASK,
    "thinking": TURNS + ASK + "<think>",
}


def add_bos(_, tokenizer):
    """Let a tokenizer without a template add a BOS token by itself, as Llama's and Gemma's do."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    adder = TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = adder
    tokenizer.chat_template = None


def chat(user="Figs?", role="user", **reply):
    return [{"role": role, "content": user}, {"role": "assistant", "content": "9"} | reply]


def call(arguments):
    return chat(content="", tool_calls=[{"name": "do", "arguments": arguments, "id": None}])


LONG = [*chat("Count.", "system")[:1], *chat(), *call({"of": "figs"}), *chat("8", "tool")]
PARTS = [{"type": "text", "text": text, "image_url": None} for text in ("Fi", "gs?")]
TOOL = {"name": "do", "of": [None]}
FIGS = "[system]Help.</s>\n[user]Figs?</s>\n[assistant]"
ONE = FIGS.replace("Help", "Count")
TWO = ONE + "9</s>\n[user]Figs?</s>\n[assistant]"
THREE = TWO + '<do {"of": "figs"}></s>\n[tool]8</s>\n[assistant]'
CHATS = {  # what is learnt of a row: prompt → response of every turn, or why nothing is
    "chatml": [
        (chat(), FIGS + "→9</s>"),
        (chat(PARTS, tool_calls=None), FIGS + "→9</s>"),
        ({"question": "Figs?", "answer": 9}, FIGS + "→9</s>"),
        ({"prompt": "Figs?", "completion": "9", "messages": None}, FIGS + "→9</s>"),
        ({"prompt": chat()[:1], "completion": chat()[1:]}, FIGS + "→9</s>"),
        ({"messages": chat(), "stop": "length"}, FIGS + "→9"),
        (chat(content="\ud83d"), FIGS + "→\ufffd</s>"),
        (call({"of": "figs", "at": {"x": None}}), FIGS + '→<do {"of": "figs", "at": {}}></s>'),
        (call({"of": [1, None]}), FIGS + '→<do {"of": [1, null]}></s>'),
        (call('{"of": null}'), FIGS + '→<do {"of": null}></s>'),
        (call(""), FIGS + "→<do {}></s>"),
        ({"messages": chat(), "tools": [TOOL | {"id": None}]}, f"[{json.dumps(TOOL)}]{FIGS}→9</s>"),
        ({"messages": chat(), "tools": json.dumps([TOOL])}, f"[{json.dumps(TOOL)}]{FIGS}→9</s>"),
        (LONG, f'{ONE}→9</s>\n{TWO}→<do {{"of": "figs"}}></s>\n{THREE}→9</s>'),
        (chat()[:1], "no assistant turn"),
        ({"text": "a"}, "no assistant turn"),
        (chat(content=" "), "empty response"),
        (chat(content=[]), "empty response"),
        (chat([{"type": "image_url"}]), "content that is not text: [{'type': 'image_url'"),
        (chat("<|mask|>"), "the control token <|mask|> is written out"),
        (chat(content="a <|end|>."), "the control token <|end|> is written out"),
        (call('{"of": "</s>"}'), "the control token </s> is written out"),
        (call('{"of": "figs'), "tool-call arguments that are not JSON"),
    ],
    "bos": [(chat(), "<s>[user]Figs?</s>\n[assistant]→9</s>")],
    "strict": [
        (chat(content="<think>9"), "[user]Figs?<|stop|>\n[assistant]→<think>9<|stop|>"),
        (chat("<|stop|>"), "the control token <|stop|> is written out"),
        (LONG[:3], "refused by the chat template (no system role)"),
    ],
    "thinking": [(chat(), "the chat template writes a question differently once it is answered")],
}


@pytest.mark.parametrize("template", CHATS)
def test_what_is_learnt_of_a_chat(template):
    """Each assistant turn is an example: what the decoder reads, then what it should write."""
    _, tokenizer = mars.toy_model()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>"]})
    tokenizer.add_tokens(["<|stop|>", "<think>"])  # not special
    if template == "bos":
        add_bos(None, tokenizer)
    tokenizer.chat_template = TEMPLATES[template]
    for row, learnt in CHATS[template]:
        row = row if isinstance(row, dict) else {"messages": row}
        found, problems = mars.encode(tokenizer, row)
        texts = ["→".join(map(tokenizer.decode, example)) for example in found]
        assert "\n".join(texts) == learnt or not texts and problems[0].startswith(learnt), row
        if found:
            (prompt, response), P = found[-1], len(found[-1][0])
            assert "tools" in row or mars.chat_ids(tokenizer, mars.question_of(row)) == prompt
            assert mars.encode(tokenizer, row, P + 1)[0] == [*found[:-1], (prompt, response[:1])]
            long = [f"prompt of {P} tokens or more"]
            assert mars.encode(tokenizer, row, P) == (found[:-1], long)


def test_what_cannot_be_learnt_is_counted_and_said(monkeypatch, capsys):
    """A row that cannot be used is not fatal, only a data set of nothing else."""
    _, tokenizer = mars.toy_model()
    bad, good = {"messages": chat(content="")}, {"messages": chat()}
    assert len(mars.tokenize(tokenizer, [bad, good, bad], 99)) == 1
    assert "1 examples, 2 unusable rows\n  2 × empty response" in capsys.readouterr().out
    monkeypatch.setattr(mars, "ids_of", lambda *_: 1 / 0)  # whatever a tokenizer raises
    with pytest.raises(mars.MarsError, match="nothing to train on in 1 rows: 1 × division by zero"):
        mars.tokenize(tokenizer, [good], 99)


ROWS = [{"question": "a", "answer": "9"}, {"question": "b\ud83d", "answer": "c"}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n\n"


@pytest.mark.parametrize("name, content, found", [
    ("a.jsonl", LINES, ROWS), ("a.jsonl", "\ufeff" + LINES, ROWS),
    ("a.json", "\ufeff" + json.dumps(ROWS, indent=1), ROWS),
    ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0), ROWS),
    ("a.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "end-of-stream"),
    ("a.gz", "{}", "Not a gzipped"),
    ("a.jsonl", '{"a": 1}\n{"a', "a.jsonl, line 2 is not a JSON object"),
    ("a.jsonl", '{"a": 1}\n9', "line 2 is not"), ("a.json", "[]", "is empty"),
    ("a.json", '[{"a": 1},\n{"a" 1}]', "line 2 is not"),
])  # fmt: skip
def test_a_file_is_read_or_named_with_the_line_that_is_wrong(name, content, found, tmp_path):
    """JSON by line or as an array, gzipped or not, with or without a byte-order mark."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if found is ROWS:
        assert mars.read_rows(str(path), "train") == ROWS
        return
    with pytest.raises(mars.MarsError, match=found):
        mars.read_rows(str(path), "train")


def test_data_sets_and_their_splits(tmp_path, monkeypatch):
    """A data set may be a Parquet file or a folder of them, saved by `datasets`, or on the hub."""
    data = datasets.Dataset.from_list(ROWS[:1] * 3)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    data.to_parquet(tmp_path / "folder/train.parquet")
    data.select([0]).to_parquet(tmp_path / "folder/test.parquet")
    for name, n in (("folder/train.parquet", 3), ("one", 3), ("saved", 1), ("folder", 1)):
        assert list(mars.read_rows(f"{tmp_path}/{name}", "test")) == ROWS[:1] * n, name
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: [*names, split])
    assert mars.read_rows("openai/gsm8k:main", "test") == ["openai/gsm8k", "main", "test"]


def test_examples_are_shown_as_they_are_trained(capsys):
    """--show-examples: what each position and its mask learn, and what the mask sees."""
    _, tokenizer = mars.toy_model()
    prompt, response = (tokenizer(text).input_ids for text in ("Figs?\n", "9 figs 8 figs<|end|>"))
    mars.show_example(tokenizer, (prompt, response, 1), 3, 2)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(line) for line in table[-7:]] == [
        "?⏎ 9", "9 ·figs M ·figs x<0", "·figs · M · x<0", "· 8 M 8 x<2", "8 ·figs M ·figs x<2",
        "·figs <|end|>", "<|end|>",
    ]  # fmt: skip


# -------- Checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("spare, own, name, token", [
    (0, True, None, "<|mask|>"),  # the tokenizer's own
    (3, False, None, "<|mask|>"),  # a new name on a row that no token uses (Qwen2.5)
    (3, True, "<|new|>", "<|new|>"),  # a name goes before the tokenizer's own
    (0, False, "<|spare|>", "<|spare|>"),  # an unused special token by name (SmolLM2)
    (0, False, None, None), (3, True, "Ann", None), (0, False, "<|end|>", None),
    (0, False, "<|new|>", None),
])  # fmt: skip
def test_the_mask_token_takes_a_row_that_is_there(spare, own, name, token, tmp_path):
    """A mask token adds no embedding; config files carry it, the block size and the ends."""
    model, tokenizer = mars.toy_model()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|spare|>"]})
    if not own:  # an unused special token like any other
        tokenizer.mask_token = None
    rows = len(tokenizer) + spare
    model.resize_token_embeddings(rows)
    if token is None:
        with pytest.raises(mars.MarsError, match=r"--mask-token, of <\|mask\|> <\|spare\|>$"):
            mars.choose_mask_token(model, tokenizer, name)
        return
    mask_id = mars.choose_mask_token(model, tokenizer, name)
    assert tokenizer.convert_ids_to_tokens(mask_id) == token and mask_id < rows
    mars.save(model, tokenizer, tmp_path, B, mask_id)
    loaded, again = mars.load(str(tmp_path), "cpu")
    assert loaded.get_input_embeddings().num_embeddings == rows
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    assert mars.choose_mask_token(loaded, again, name) == again.mask_token_id == mask_id
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (plain.config.mars_block_size, plain.config.mars_mask_token_id) == (B, mask_id)
    assert plain.generation_config.suppress_tokens == [mask_id]
    assert plain.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_a_new_mask_token_never_takes_the_id_of_another():
    """Where ids have a gap, a new token would get the id of an old one."""
    model, tokenizer = mars.toy_model()
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) | {"added_tokens": []}
    vocab = parts["model"]["vocab"]
    vocab |= {token: i + 1 for token, i in vocab.items() if i >= 50}
    gaps = Tokenizer.from_str(json.dumps(parts))
    model.resize_token_embeddings(len(vocab) + 4)
    with pytest.raises(mars.MarsError, match="no room for a mask token"):
        mars.choose_mask_token(model, transformers.PreTrainedTokenizerFast(tokenizer_object=gaps))


def no_template(model, tokenizer):
    tokenizer.chat_template = tokenizer.eos_token = None


def no_end(model, tokenizer):
    no_template(model, tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = None


def template_beyond(model, tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "<|turn|>" + tokenizer.chat_template


@pytest.mark.parametrize("change, problem", [
    (lambda _, tokenizer: tokenizer.add_special_tokens({"pad_token": "[PAD]"}), None),
    (no_template, None), (no_end, "eos_token"), (template_beyond, r"<\|turn\|> has id"),
    (lambda _, tokenizer: tokenizer.add_tokens(["<beyond>"]), r"<beyond> has id (\d+), but .* \1 embeddings"),
    (lambda model, _: model.model.norm.weight.data[:1].fill_(math.nan), "norm.weight"),
    (lambda model, _: model.lm_head.weight.data[300].fill_(math.inf), "embed_tokens"),
    (add_bos, None),
])  # fmt: skip
def test_what_would_fail_later_is_refused_at_loading(change, problem, tmp_path, capsys):
    """Tokens without an embedding, weights that are no numbers, texts without an end."""
    model, tokenizer = mars.toy_model()
    change(model, tokenizer)
    if change is add_bos:
        model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if problem:
        with pytest.raises(mars.MarsError, match=problem):
            mars.load(str(tmp_path), "cpu")
        return
    model, tokenizer = mars.load(str(tmp_path), "cpu")
    assert ("using a plain one" in capsys.readouterr().err) == (change in (no_template, add_bos))
    ((prompt, response),), _ = mars.encode(tokenizer, {"question": "a", "answer": "b"})
    bos = "<s>" if change is add_bos else ""
    assert tokenizer.decode(prompt) == bos + "User:\na<|end|>\nAssistant:\n"
    assert response[-1] == tokenizer.eos_token_id and mars.end_tokens(model) == {response[-1]}
    mars.hf_generate(model, [[5, 6, 7], [5]], 3, 2)  # needs a pad token


def test_what_a_checkpoint_cannot_do_is_refused():
    """Without masks there is neither a threshold nor a draft; all errors come before the work."""
    plain = copy.deepcopy(tiny())
    plain.config.mars_block_size = None
    assert mars.generate(plain, [[5]], 3)[0].steps == [1, 1, 1]
    for complaint, model, prompt, options in (
        ("not trained with masks", plain, [5], dict(threshold=0.9)),
        ("not trained with masks", plain, [5], dict(lossless=True)),
        ("window is 256", tiny(), [], {}), ("window is 256", tiny(), [5] * 256, {}),
        ("2 thresholds for 1", tiny(), [5], dict(threshold=[1.0, 1.0])),
        ("no metric 'top'", tiny(), [5], dict(metric="top")),
        ("max_new_tokens is 0", tiny(), [5], dict(max_new_tokens=0)),
        ("batch_size is 0", tiny(), [5], dict(batch_size=0)),
    ):  # fmt: skip
        with pytest.raises(mars.MarsError, match=complaint):
            mars.stream(model, [prompt], **options)


ROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)


@pytest.mark.parametrize("reason, kind, options", [
    ("sdpa", "llama", dict(attn_implementation="eager")), ("sdpa", "gemma2", {}),
    ("sdpa", "llama", dict(attn_implementation="flex_attention")), ("does not take", "opt", {}),
    ("recurrent", "mamba", {}), ("recurrent", "qwen3_next", dict(head_dim=8)),
    ("chunked", "llama4_text", dict(head_dim=8)), ("sdpa", "bloom", {}),
    ("longest row", "phi3", dict(original_max_position_embeddings=80, rope_parameters=ROPE)),
])  # fmt: skip
def test_models_that_would_be_silently_wrong_are_refused(reason, kind, options):
    """With some layers, positions and masks decoding would be wrong."""
    with pytest.raises(mars.MarsError, match=reason):
        mars.stream(tiny.__wrapped__(kind, **options), [])


@pytest.mark.parametrize("ignored", "attention_mask position_ids logits_to_keep cap".split())
def test_a_model_that_differs_on_a_tiny_example_is_refused(ignored, monkeypatch):
    """What it predicts in training and over the cache must be what it predicts for plain text."""
    model = copy.deepcopy(tiny("gemma3_text"))
    if ignored == "cap":
        monkeypatch.setattr(mars, "project", lambda model, h: model.get_output_embeddings()(h))
    hook = lambda _, args, kw: (args, {k: v for k, v in kw.items() if k != ignored})
    for module in (model, model.model):
        module.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(mars.MarsError, match="those of the plain|does not take"):
        mars.check_model(model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    model, tokenizer = mars.toy_model()
    mars.save(model, tokenizer, folder, B, tokenizer.mask_token_id)
    return str(folder)


# -------- The command line ------------------------------------------------------------------------


def command(words):
    """Run a command of mars.py or eval.py; returns the rows of its --json."""
    ours = words.startswith(("train", "generate", "bench"))
    (mars if ours else evaluation).main(words.split())
    return json.loads(Path(words.split()[-1]).read_text())["rows"] if "--json" in words else None


def refused(capsys, words):
    """What a command complains of: one line, with exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("error: ")
    return error


QUESTIONS = [{k: row[k] for k in ("question", "answer")} for row in mars.toy_rows("test", 8)]
BAD = """
generate --model none Hi : python mars.py train
generate --model none/x Hi : python mars.py train
generate --model broken Hi : python mars.py train
generate --model truncated Hi : python mars.py train
generate --model Qwen/Qwen2.5-0.5B-Instruct Hi : t connect to
generate --threshold 0 Hi : out of range
generate --threshold 1.5 Hi : out of range
generate --threshold nan Hi : out of range
generate --metric entropy --threshold -1 Hi : out of range
generate --threshold 0.9 --lossless Hi : no threshold
generate --temperature -1 Hi : temperature
generate --block-size 9 Hi : block size 9
generate --max-new-tokens 3 LONG : window
generate --device no Hi : device no
generate <|mask|> : token <|mask|>
generate --data ok.jsonl : belong together
train : --data
train --data ok.jsonl --block-size 1 : block size 1
train --data none.jsonl : no data file
train --data none : cannot load
train --data bad.jsonl : line 2
train --data text.jsonl : no usable columns
train --epochs nan : not a number above 0
train --show-examples -1 : at least 1
bench --thresholds 0.9,2 : out of range
bench --batch-sizes 1,x : at least 1
arc : arc
gsm8k --data half.jsonl : 'answer'
gsm8k --data words.jsonl : no number
gsm8k --data ok.jsonl --thresholds 0.5,2 : out of range
gsm8k --data ok.jsonl --model plain : no chat template
humaneval --data ok.jsonl --run-code : 'task_id'
humaneval --data code.jsonl : --run-code
toy --resume : --samples
toy --plot a.txt : .png
toy --samples no/x : no folder
load --rates nan : --rates
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, checkpoint):
    """A folder with files and checkpoints that are wrong."""
    folder = tmp_path_factory.mktemp("place")
    code = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), "a")
    for name, text in {
        "ok": json.dumps(QUESTIONS[0]), "bad": '{"question": "a", "answer": "b"}\n{"',
        "half": '{"question": "a"}', "words": '{"question": "a", "answer": "b"}',
        "text": '{"text": "a"}', "code": json.dumps(code),
    }.items():  # fmt: skip
        (folder / f"{name}.jsonl").write_text(text)
    for name in ("ok", "plain", "broken", "truncated"):
        shutil.copytree(checkpoint, folder / name)
    (folder / "plain/chat_template.jinja").unlink()
    (folder / "broken/config.json").write_text("{")
    os.truncate(folder / "truncated/model.safetensors", 10_000)
    (folder / "Qwen").mkdir()  # no checkpoint, for all its name
    return folder


@pytest.mark.parametrize("case", BAD.strip().split("\n"))
def test_bad_input_is_one_line_and_exit_status_2(case, place, capsys, monkeypatch):
    """What the user can put right is said in one line, without a traceback; nothing is written."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    words, complaint = case.replace("LONG", "fig," * 600).split(" : ")
    words += "" if "--model" in words else " --model ok"
    words += "" if words.startswith("train") else " --json out.json"
    assert complaint in refused(capsys, words)
    assert sorted(place.rglob("*")) == before


def test_too_little_memory_is_one_line(capsys, monkeypatch):
    """A batch that is too large for the device is something the user can put right."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nSee the manual.")

    monkeypatch.setattr(mars, "generate_command", full)
    assert refused(capsys, "generate Hi") == "error: CUDA out of memory.\n"


def test_the_commands_work_end_to_end(checkpoint, tmp_path, capsys):
    """Train on a split of a data set, generate, and time, as a user would."""
    (tmp_path / "data").mkdir()
    for split, n in (("train", 1), ("test", 8)):
        datasets.Dataset.from_list(QUESTIONS[:n]).to_parquet(tmp_path / f"data/{split}.parquet")
    words = f"train --model {checkpoint} --data {tmp_path}/data --split test --out {tmp_path}"
    command(f"{words} --max-steps 2 --batch-size 2 --show-examples 1")
    printed = capsys.readouterr().out
    assert "8 examples, 0 unusable rows" in printed and printed.count("sees\n") == 1
    models = [mars.load(f"{tmp_path}/{stage}")[0] for stage in ("ar", "mars")]
    assert [mars.trained_block_size(model) for model in models] == [1, B]
    options = f"--model {tmp_path}/mars --max-new-tokens 6 --json {tmp_path}/r.json"
    (row,) = command(f"generate Hi {options}")
    printed = capsys.readouterr()
    assert row["answer"] in printed.out and "\x1b" not in printed.out
    assert "tokens per pass" in printed.err and sum(row["steps"]) == len(row["tokens"])
    bench = "bench --limit 4 --repeats 1 --batch-sizes 1,2"
    rows = command(f"{bench} --lossless --thresholds 1,0.9 {options}")
    modes = ["hf", "lookup", "ar", "mars", "lossless", "hf", "ar", "mars", "lossless"]
    assert [row["mode"] for row in rows] == modes and rows[0]["speedup"] == 1
    assert all(row["same_as_hf"] == 4 for row in rows if row["mode"] != "mars")
    rows = command(f"{bench} --train {options}")
    assert [row["mode"] for row in rows] == ["ar", "mars"] and rows[1]["time_ratio"] > 0


# -------- model.generate of a checkpoint, and answers to a whole file -----------------------------


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A checkpoint that is sure of some tokens, loaded as ours and as plain, and questions."""
    folder = tmp_path_factory.mktemp("talking")
    model, tokenizer = mars.toy_model()
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1  # or an untrained model repeats one token
    mars.save(model, tokenizer, folder, B, tokenizer.mask_token_id)
    ours = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    plain, tokenizer.padding_side = AutoModelForCausalLM.from_pretrained(folder), "left"
    texts = [f"User:\n{row['question']}<|end|>\nAssistant:\n" for row in QUESTIONS]
    return folder, tokenizer, ours, plain, tokenizer(texts, padding=True, return_tensors="pt")


def outputs(model, inputs, *options, **more):
    """The new tokens of `mars.generate` for prompts that are padded on the left."""
    prompts = [i[m.bool()].tolist() for i, m in zip(inputs["input_ids"], inputs["attention_mask"])]
    return [torch.tensor(out.tokens) for out in mars.generate(model, prompts, *options, **more)]


@pytest.mark.parametrize("rule", [dict(threshold=1.0), dict(threshold=0.05), dict(lossless=True)])
@pytest.mark.parametrize("batch", [1, 8])
def test_generate_of_a_checkpoint_is_ours(rule, batch, talking):
    """`model.generate` with trust_remote_code: our tokens, in Hugging Face's shape."""
    _, tokenizer, ours, plain, inputs = talking
    inputs = {name: tensor[:batch] for name, tensor in inputs.items()}
    ids, pad = inputs["input_ids"], dict(batch_first=True, padding_value=tokenizer.pad_token_id)
    new = torch.nn.utils.rnn.pad_sequence(outputs(plain, inputs, 30, **rule), **pad)
    expected = torch.cat([ids, new], 1)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=30, **rule), expected)
    assert torch.equal(ours.generate(**inputs, max_length=ids.shape[1] + 30, **rule), expected)
    greedy = plain.generate(**inputs, max_new_tokens=30)
    assert torch.equal(greedy, expected) == (rule.get("threshold") != 0.05)


def test_generate_of_a_checkpoint_honours_or_refuses(talking):
    """Sampling, streamers, criteria, end tokens, pipelines work; what cannot is one line."""
    _, tokenizer, model, plain, inputs = talking
    row, P = {name: tensor[:1] for name, tensor in inputs.items()}, inputs.input_ids.shape[1]
    sampled = model.generate(**inputs, max_new_tokens=9, do_sample=True, temperature=0.7, seed=3)
    for ids, new in zip(sampled, outputs(plain, inputs, 9, temperature=0.7, seed=3)):
        assert torch.equal(ids[P : P + len(new)], new)
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    (ids,) = model.generate(**row, max_new_tokens=20, lossless=True, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(ids[P:])
    stop = lambda ids_so_far, _: ids_so_far[:, -1] == ids[P + 4]  # in the middle of a pass
    options = dict(max_new_tokens=20, stopping_criteria=transformers.StoppingCriteriaList([stop]))
    stopped = plain.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, lossless=True, **options), stopped)
    assert stopped.shape[1] == P + 20 and stopped[0, P + 5] == tokenizer.pad_token_id
    end = int(ids[P + 2])
    config = transformers.GenerationConfig(max_new_tokens=20, eos_token_id=end)
    (short,) = model.generate(**row, generation_config=config, threshold=1.0)
    assert short[P:].tolist() == mars.until_end(ids[P:].tolist(), {end})
    assert mars.end_tokens(model) == mars.end_tokens(plain)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = tokenizer.decode(row["input_ids"][0][row["attention_mask"][0].bool()])
    said = pipe(text, max_new_tokens=20, do_sample=False, lossless=True, return_full_text=False)
    assert said[0]["generated_text"] == tokenizer.decode(ids[P:], skip_special_tokens=True)
    wrong = dict(num_beams=2, logits_processor=[print], top_p=0.5, thresold=0.9)
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"cannot honour {name}: leave it out"):
            model.generate(**inputs, **{name: value})


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_questions_is_answered_and_learnt_from(talking, tmp_path, capsys):
    """`generate --data --out` continues where it was stopped, and `train` takes what it wrote."""
    folder, tokenizer, _, plain, inputs = talking
    data, out = tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    rows = [{"question": "<|end|>", "answer": "a"}, *QUESTIONS]  # one that cannot be asked
    data.write_text("\n".join(map(json.dumps, rows)))
    words = f"generate --model {folder} --data {data} --out {out} --max-new-tokens 12 --threshold 1"
    command(words)
    assert "8 answers" in capsys.readouterr().out
    records, lines = read_lines(out), out.read_text().splitlines(True)
    said = outputs(plain, inputs, 12, 1.0)
    assert sorted(record["index"] for record in records) == [1, 2, 3, 4, 5, 6, 7, 8]
    for record in records:
        i, ((_, response),) = record["index"], mars.encode(tokenizer, record)[0]
        assert record["prompt"] == mars.messages_of(rows[i])[:1]
        assert record["answer"] == tokenizer.decode(said[i - 1], skip_special_tokens=True)
        assert record["steps"] == [1] * len(said[i - 1])
        assert (response[-1] in mars.end_tokens(plain)) == (record["stop"] == "eos")
    out.write_text("".join(lines[:3]) + lines[3][:20])
    command(words)
    assert "5 answers" in capsys.readouterr().out
    assert sorted(out.read_text().splitlines(True)) == sorted(lines)
    command(f"train --model {folder} --data {out} --stage ar --max-steps 1 --out {tmp_path}/out")
    assert "8 examples" in capsys.readouterr().out
    data.write_text(json.dumps(QUESTIONS[1]))
    assert "other questions" in refused(capsys, words)


@pytest.mark.parametrize("module", [mars, evaluation])
def test_the_script_metadata_name_the_requirements(module):
    """`uv run mars.py` installs what requirements.txt names, but for the tests."""
    file = Path(module.__file__)
    metadata = re.search(r"(?m)^# dependencies = (\[.*\])$", file.read_text())
    requirements = file.with_name("requirements.txt").read_text().split()
    assert json.loads(metadata[1]) == [x for x in requirements if not x.startswith("pytest")]


# -------- Evaluation: what counts as right, and how model-written code is held --------------------

NUMBERS = {  # | separates answers, / begins a line
    18: r"""
        18 | 18.00 | **18** | She makes $18/day. | 18% | so 9*2=18 | (18) | ####18 | #### $18.
        #### 18 eggs per 2 days | #### 9 * 2 = 18 | #### 3 / #### 18 | #### 9 eggs x $2/egg = $18
        #### 18 / - 9 eggs x 2 | The answer is 18 / - 9 eggs | #### 2. Add / The answer is 18.
        #### Step 2: 5 more / So 18 | #### Day 1 = 5 pages / So 18 | Answer: 9 eggs * $2 = $18
        To find the answer: / 1. Multiply 3*4=12 / 2. So 18 | The answer is about 18. And 3 left
        \boxed{\$18}, in 7 days | \boxed{\text{18 dollars}} | \boxed{9\times2=18} | x_1 is 18 m²
        The answer is **18**. If you have questions, answer 3 more | **Answer: 18** (9 times 2)
        The answer is \(18\). Ask me if you want the other 2 ways. | #### \(18\), 3 left
        The answer is \[18\] in 3 | \(\boxed{18}\) in 3 | The answer is \( x = 18 \). 3 ways
        **Answer:** / 18 eggs /  / That took 3 steps. | ### Answer / 18 /  / in 3
        Answer: / She has 18 eggs. /  / In 3 | Answer: / 1. Add 3 = 12 / 2. So 18
        To find the answer: / 3 * 4 = 12 figs. / Then 12 + 6 = 18. | The answer is __18__, in 3
        The answer is eighteen (18), in 3 days. | The answer is **ten plus eight (18)** in 3""",
    1234: r"1,234 | $1,234.00 | 1 234 | 1{,}234 | 1\,234 | 1 234 km | \boxed{1,\!234}",
    2_000_000: "2 millions | 2,000,000 | $2 Million.", 5: "10-5 | 10 - 5 | a-5",
    -5: r"-5 | $-5 | -$5 | −5 | –5 | x=-5 | (-5) | \boxed{-5} | The answer is \(-5\), 3",
    0.75: r"3/4 | .75 | ¾ | \frac{3}{4} | \boxed{\dfrac{3}{4}} | #### 3/4 cup",
    1.5: r"1 1/2 | 1½ | 1\frac{1}{2}", -0.5: "-1/2 | -½ | -0.50",
    None: "none | #### | eighteen | \\boxed{} | 5/0 | #### x | m² | " + "9" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_every_form_of_a_number(number):
    """GSM8K: what a careful reader takes for the answer; no answer is None, never an exception."""
    for answer in re.split(r" \| |\n +", NUMBERS[number].strip()):
        answer = answer.replace(" / ", "\n")
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
FENCES = SHORT.replace(BODY, "    '''So:\n    ```\n    ~~~\n    ```python\n    '''\n")
TABLE = f"TABLE = []\nfor i in range(9):\n    TABLE.append(2 * i)\n{SHORT}".replace("double(x)", "TABLE[x]")
ANSWERS = f"""The function:\n{SHORT}\nIt works.
===
Sure! Here it is: ```python\n{PROMPT}{BODY}```\n\nIt doubles `x`.
===
```py\n{SHORT}\nprint(first([
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
<|im_start|>assistant\n{SHORT}<|im_end|>\n<|im_start|>user\ndef first(xs, default=0): pass
===
```\nEND = "</s>"\n{SHORT.replace("double(x)", "double(x) if END > '<' else '<|im_end|>'")}```</s>
===
```\nfrom __future__ import (\n    annotations,\n)\nclass A:\n    def f(a: B): ...\n{SHORT}```
===
import functools\n\n@functools.wraps(double)\n{SHORT}
===
first = lambda xs, default=0: double(xs[0]) if xs else default
===
```python\n{FENCES}{BODY}```
===
````\n{(FENCES + BODY).replace("    ", "  ")}````
===
~~~python\nFENCE = '''\n```\n'''\n{SHORT}~~~\nIt works.
===
```\n{TABLE}```
===
```\n{SHORT}    first.calls += 1\nfirst.calls = 0\nimport sys\nsys.setrecursionlimit(10_000)\n```
===
```\n{SHORT}```\n```\nfrom solution import first\ndef test():\n    assert first(1) == 1\ntest()\n```
===
{SHORT}\nn = int(input())\nprint(first(n))\nassert 0\nfirst()\nraise KeyboardInterrupt\nexit()
===
{SHORT}\nwhile True: print(first([]))\nfirst = first([])\nif __name__ == "_":\n    while 1: pass
"""  # fmt: skip
TEST = "def check(f):\n    assert f([3, 4]) == 6\n    assert f([], 7) == 7"
PROBLEM = dict(task_id="t/0", code=PROMPT, entry_point="first", test=TEST)


def held():
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
    score = lambda answer: evaluation.score_function(PROBLEM, answer, argparse.Namespace(run_code=True))
    for answer in ANSWERS.split("\n===\n"):
        assert score(answer)["correct"], (answer, score(answer))
        assert not score(answer.replace("default", "None"))["correct"], answer
    for answer in ("", "I cannot.", "```", PROMPT, "(" * 500, "1+" * 5000, "\0", BODY[:20]):
        assert not score(answer)["correct"], answer
    bare = "def f(x):\n"  # without a docstring the prompt alone is no program
    for answer in ("def f(x):\n    return x", "return x"):
        exec(bare + evaluation.extract_code(answer, bare, "f"), scope := {})
        assert scope["f"](3) == 3


HOSTILE = {
    "while True: pass": "took longer", "input()": "EOFError", "raise KeyboardInterrupt": "Keyboard",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass": "took longer",
    "bytearray(10 * 2**30)": "MemoryError", "import ctypes; ctypes.string_at(0)": "signal 11",
    "try:\n    while True: print('x' * 10**6)\nexcept OSError: pass": "1 MB",
    "open('f', 'w').write('x' * 2**21)": "too large", "open('/etc/f', 'w')": "OSError(30",
    "[open(f'{i}', 'w').write('x' * 2**20) for i in range(65)]": "No space",
    "[open('/dev/null') for _ in range(99)]": "Too many", "exit()": "Exit",
    "import socket; socket.create_connection(('1.1.1.1', 53), 1)": "unreachable",
    "import os; os._exit(0)": "ended before",
    "import os, time\nif os.fork():\n    time.sleep(0.5)\n    os._exit(0)": "ended before",
    "import os\nfor pid in (1, -1, 0):\n    try: os.kill(pid, 9)\n    except OSError: pass": "",
    "import os\nassert not os.listdir() and 'SECRET_OF_OURS' not in os.environ\n1 / 0": "ZeroDiv",
    "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0": "AssertionError",
    "import ctypes, time\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(9)": "took longer",
}  # fmt: skip
LEAVE = """import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execvp("sleep", ["sleep", "1234567"])
    os._exit(0)
time.sleep(0.3)"""


def test_hostile_programs_fail_alone(monkeypatch):
    """Whatever a program does, it fails for itself, is gone afterwards, and the next one runs."""
    held()
    monkeypatch.setattr(evaluation, "SECONDS", 1)
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    for program, reason in HOSTILE.items():
        error = evaluation.run_program(program)
        assert error and reason in error, (program, error)
    for program in (LEAVE, "import sys\nsys.stdout = None", "import json, random, subprocess"):
        assert evaluation.run_program(program) is None
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"1234567" in line for line in lines)
    monkeypatch.setattr(evaluation, "SANDBOX", "echo not here; exit 1")
    with pytest.raises(mars.MarsError, match="no safe way.*not here"):
        evaluation.check_sandbox()


def test_humaneval_keeps_programs_until_it_may_run_them(checkpoint, tmp_path):
    """Without --run-code programs are kept; with --resume --run-code they are scored."""
    held()
    rows = [PROBLEM | {"prompt": PROMPT, "task_id": f"t/{i}"} for i in range(2)]
    data, samples = tmp_path / "test.parquet", tmp_path / "s"
    datasets.Dataset.from_list(rows).to_parquet(data)
    words = f"humaneval --model {checkpoint} --data {data} --limit 1 --max-new-tokens 4"
    words += f" --thresholds 1.0 --samples {samples}"
    (row,) = command(f"{words} --json {tmp_path}/a.json")
    assert row["accuracy"] is None and row["n"] == 1
    samples.write_text(json.dumps(read_lines(samples)[0] | {"completion": SHORT}))
    for more in ("--run-code", ""):  # a verdict stays
        (row,) = command(f"{words} --resume {more} --json {tmp_path}/a.json")
        assert row["accuracy"] == 1 and read_lines(samples)[0]["correct"] is True


def figures(rows):
    """What is the same however fast the machine is; lossless decoding chooses its pace by speed."""
    names = "mode threshold n accuracy tokens_per_forward".split()
    return [[row[name] for name in names[: 4 if row["mode"] == "lossless" else 5]] for row in rows]


def test_an_interrupted_run_is_continued(checkpoint, tmp_path, capsys):
    """--resume answers only what is missing, scores what is there, and refuses other weights."""
    data, samples, model = tmp_path / "data", tmp_path / "s.jsonl", tmp_path / "model"
    datasets.Dataset.from_list(QUESTIONS).save_to_disk(data)
    shutil.copytree(checkpoint, model)
    words = f"gsm8k --model {model} --data {data} --max-new-tokens 8 --batch-size 3 --baseline"
    words += f" --thresholds 1.0,0.5 --lossless --samples {samples}"
    resume, result = f"{words} --resume", f"--json {tmp_path}/a.json"
    rows = command(f"{words} {result}")
    modes = [("hf", None), ("ar", 1.0), ("mars", 0.5), ("lossless", None)]
    assert [(row["mode"], row["threshold"], row["n"]) for row in rows] == [(*m, 8) for m in modes]
    assert rows[0]["speedup"] == 1 and all(row["speedup"] > 0 == row["accuracy"] for row in rows)
    lines, records = samples.read_text().splitlines(True), read_lines(samples)
    assert {record["prompt"] for record in records} == {q["question"] for q in QUESTIONS}
    assert len(records) == 32 and all(sum(record["steps"]) <= 8 for record in records)
    samples.write_text("".join([*lines[:5], *lines[8:13], lines[13][:40]]))  # cut in mid-line
    assert figures(command(f"{resume} {result}")) == figures(rows)
    kept = lambda records: {(r["mode"], r["threshold"], r["id"], r["completion"]) for r in records}
    assert kept(read_lines(samples)) == kept(records)
    for record in records:  # a saved completion is scored anew
        record["completion"] = QUESTIONS[int(record["id"][6:])]["answer"]
    samples.write_text("\n".join(map(json.dumps, records)))
    assert [row["accuracy"] for row in command(f"{resume} {result}")] == [1, 1, 1, 1]
    assert "--resume" in refused(capsys, words)
    assert "max_new_tokens" in refused(capsys, f"{resume} --max-new-tokens 9")
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "another weights" in refused(capsys, resume)
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTIONS[0] | {"question": "Why?"}))
    other = f"--resume --model {checkpoint} --data {tmp_path}/q.jsonl"
    assert "another" in refused(capsys, f"{words} {other}")
    assert len(read_lines(samples)) == 32
    samples.write_text("precious")
    assert "not of a samples file" in refused(capsys, resume)
    assert samples.read_text() == "precious"


def test_several_processes_report_what_one_does(checkpoint, tmp_path):
    """Under torchrun the ranks share the problems; the table is the same."""
    data = tmp_path / "q.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS[:5])))
    words = f"gsm8k --model {checkpoint} --data {data} --max-new-tokens 8 --thresholds 1.0,0.5"
    alone = command(f"{words} --json {tmp_path}/a.json")
    ranks = f"-m torch.distributed.run --standalone --nproc_per_node 2 {evaluation.__file__}"
    words = f"{ranks} {words} --samples {tmp_path}/b --json {tmp_path}/b.json".split()
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert figures(json.loads((tmp_path / "b.json").read_text())["rows"]) == figures(alone)
    assert len(read_lines(tmp_path / "b")) == 10 and ran.stdout.count("tokens/pass") == 1


def test_the_frontier_is_drawn_where_matplotlib_is(checkpoint, tmp_path, capsys, monkeypatch):
    """--plot needs matplotlib, and says so at once."""
    words = f"toy --model {checkpoint} --limit 4 --max-new-tokens 4 --plot {tmp_path}/f.png"
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "find_spec", lambda name: None)
        assert "pip install matplotlib" in refused(capsys, words)
    pytest.importorskip("matplotlib")
    command(words)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_policies_under_load(checkpoint, tmp_path):
    """Requests at random get the answers that they would get alone; τ falls in a queue."""
    words = f"load --model {checkpoint} --limit 12 --max-new-tokens 6 --batch-size 2 --rates 0.1,50"
    rows = command(f"{words} --json {tmp_path}/l.json")
    cells = [(row["load"], row["policy"]) for row in rows]
    assert cells == list(itertools.product((0.1, 50), evaluation.POLICIES))
    assert all(0 < r["latency_p50"] <= r["latency_p95"] and r["throughput"] > 0 for r in rows)
    taus = [row["mean_threshold"] for row in rows]
    assert taus[:3] == taus[4:7] == [1, 0.9, None] and 0.9 <= taus[7] < 0.99 < taus[3] <= 1
    model, tokenizer = mars.load(checkpoint)
    texts = [mars.chat_ids(tokenizer, mars.question_of(row)) for row in QUESTIONS]
    alone = [out.tokens for out in mars.generate(model, texts, 6, 1.0, batch_size=1)]
    args = argparse.Namespace(max_new_tokens=6, batch_size=3)
    for policy in ("fixed-1.0", "lossless"):
        due = [0.01 * i for i in range(len(texts))]
        latencies, outs, _ = evaluation.serve(model, texts, due, policy, args)
        assert outs == alone and min(latencies) > 0
