"""Measure a checkpoint: what does each threshold cost in accuracy, and what does it buy in speed?

    python eval.py toy                                                     # 1,000 toy problems
    python eval.py gsm8k --model runs/my/mars --thresholds 1.0,0.95,0.9    # 1,319 word problems
    python eval.py humaneval --model runs/my/mars --run-code               # 164 Python functions

As in the paper: zero-shot, the model's own chat template, greedy, 256 new tokens.
"""

# /// script
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "datasets==5.2.0", "tqdm==4.70.1"]
# ///

import ast
import inspect
import json
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import unicodedata
import warnings
import zlib
from fractions import Fraction
from importlib.util import find_spec
from itertools import accumulate, chain, islice, product
from pathlib import Path
from statistics import fmean
from time import perf_counter

import torch
import torch.distributed as dist

import mars
from mars import require

warnings.simplefilter("ignore", SyntaxWarning)  # about code that a model wrote

# A task has a function that lists its problems, {"id", "prompt": what the user asks, …}, and one
# that scores a completion: {"extracted": what was taken for the answer, "correct": the verdict}.


def read_problems(hub_id, args, *names):
    """The first `--limit` rows of the data; a MarsError unless they have these fields, as text."""
    rows = mars.read_rows(args.data or hub_id, "test")
    rows = list(islice(rows, args.limit))  # subtle: a slice of a `Dataset` is columns
    for number, row in enumerate(rows, 1):
        for name in names:
            text = isinstance(row.get(name), str)
            require(text, f"row {number} of the data has no text in the field {name!r}")
    return rows


# -------- Toy: held-out problems of the world that `python mars.py train` learns ------------------


def toy_problems(args):
    return numbered(mars.toy_rows("test", args.limit), args)


def numbered(rows, args):
    """Rows with a question and an answer as problems."""
    return [{**row, "id": f"{args.task}/{i}", "prompt": row["question"]} for i, row in enumerate(rows)]


# -------- GSM8K: word problems whose answer is a number -------------------------------------------

INTEGER = r"(?: [0-9]{1,3} (?:,[0-9]{3}|[ ][0-9]{3})+ (?![0-9]) | [0-9]+ )"  # 1,234 1 234 1234
NUMBER = rf"""
    (?<![\w.^]) (?<![\^_]\{{)                  # not inside a word, an exponent or an index
    (?P<sign> (?:(?<![)\]}}])-)? [$€£¥]? -? )   # -$5 and $-5, but not of 10-5
    (?: (?P<whole>[0-9]+)[ ](?=[0-9]+/[0-9]) )?
    (?P<number> {INTEGER} (?:\.[0-9]+)? | \.[0-9]+ ) (?!\.?[0-9])
    (?: [ ]?/[ ]?(?P<divisor>{INTEGER}) (?!\.?[0-9]) )?
    (?: [ ]?(?P<scale>thousand|million|billion)s?\b )?
"""
RESULT = rf"""
    (?: [^\w\n\\] | \\[a-z]+ | \b(?:the|final|answer|is|about|approximately)\b
        | [a-z -]+(?=\() ){{0,20}}? {NUMBER}
    (?! [ ]?[*/+x×÷^-][ ]?[$(]*[0-9])  # but not the start of a sum
"""
NO_STEP = r"""(?! \W* (?: (?!answer|total|result|is\b)[a-z]+[ ][0-9]  # "Step 2", "1. Add"
                      | [0-9]{1,2}(?:[.):]|[ ]-)[ ]+\S ))"""
SIGNS = (  # of the answer, the clearest first; of 9 * 2 = 18 it is the 18
    rf"\#\#\#\#\s* {NO_STEP} (?:[^\n]*=)? {RESULT}",
    rf"\\boxed\s*\{{ (?:[^{{}}\n]*=)? {RESULT}",
    rf"""(?: (?:^\W*(?:(?:the|final|correct)[ ])*answer | \banswer[ ]is) \W*\n\s* {NO_STEP}
            (?: [^\n]*= | [^\n0-9]*[ ](?=\S+[^\n0-9]*$) )?
        | \banswer\b (?:[ ](?!is\b)[a-z']+){{0,6}} [*_]*[ ]*(?:is\b|:|=)
            (?:(?:(?![.;,]\s)[^\n])*=)? ) {RESULT}""",
    NUMBER,
)
FLAGS = re.VERBOSE | re.ASCII | re.IGNORECASE | re.MULTILINE
PATTERNS = [re.compile(sign, FLAGS) for sign in SIGNS]
SCALES = {"": 1, "thousand": 10**3, "million": 10**6, "billion": 10**9}
LATEX = (  # and fractions that are one character, before they become 1/2
    (r"(?<=[0-9])(?=[¼-¾⅐-⅞]|\\[dt]?frac)", " "),
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\[,! ])(?=[0-9]{3})", ","),
    (r"\\([][$%()])|__", r"\1"),
)


def extract_number(text: str) -> Fraction | None:
    """The number that a careful reader takes for the answer; None if there is none.

    It is the one after the last `####`, else in the last `\\boxed{}`, else after the last "answer
    is", else the last one.
    """
    for pattern, plain in LATEX:
        text = re.sub(pattern, plain, text)
    text = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2013: "-", 0x2044: "/"})
    found = [matches[-1] for p in PATTERNS if (matches := list(p.finditer(text)))]
    if not found or len(found[0][0]) > 100:  # no answer has so many digits
        return None
    part = {name: re.sub("[ ,]", "", value or "") for name, value in found[0].groupdict().items()}
    divisor = int(part["divisor"] or 1)
    if not divisor:
        return None
    number = int(part["whole"] or 0) + Fraction(part["number"]) / divisor
    return number * SCALES[part["scale"].lower()] * (-1 if "-" in part["sign"] else 1)


def gsm8k_problems(args) -> list[dict]:
    rows = read_problems("openai/gsm8k:main", args, "question", "answer")
    for number, row in enumerate(rows, 1):
        found = extract_number(row["answer"])
        require(found is not None, f"row {number} of the data has no number in the field 'answer'")
    return numbered(rows, args)


def score_number(problem: dict, completion: str, args) -> dict:
    number = extract_number(completion)
    correct = number is not None and number == extract_number(problem["answer"])
    return {"extracted": None if number is None else str(number), "correct": correct}


# -------- HumanEval: Python functions that must pass a test ---------------------------------------

ASK_CODE = (
    "Complete this Python function. Answer with the whole function in one block of code, "
    "without explanation.\n\n```python\n{}\n```"
)


def humaneval_problems(args) -> list[dict]:
    """`prompt` is what the model is asked, `code` what the program to run begins with."""
    names = ("task_id", "prompt", "entry_point", "test")
    rows = read_problems("openai/openai_humaneval", args, *names)
    for row in rows:
        code = row["prompt"].rstrip() + "\n"
        row |= {"id": row["task_id"], "code": code, "prompt": ASK_CODE.format(code.strip())}
    return rows


CHAT_TOKEN = r"(?:<\|[^|<>\n]*\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\])"  # as text
FENCE = re.compile(r"(?:^|[ :])(?:`{3,}|~{3,})[^`]*$")
CODE = re.compile(r"(?:def|class|import)\b|@|from\s+\S+\s+import\b|\w+\s*=")  # without a fence


def parse(lines):
    """The statements that a text begins with, their lines, and whether the last is complete."""
    indent = re.match(r"\s*", next(filter(str.strip, lines), ""))[0]
    lines, after = [line.removeprefix(indent) for line in lines], ""
    while lines:
        try:
            tree = ast.parse("\n".join(lines))
            ast.unparse(tree)  # may be nested too deeply
            compile(tree, "answer", "exec")  # finds a return outside a function
            return tree.body, len(lines), not after[:1].isspace()
        except SyntaxError as error:
            bad = min(error.lineno or 1, len(lines)) - 1
            after = lines[bad]
            code = re.split(CHAT_TOKEN, after)[0]
            lines[bad:] = [code] if code != after else []
        except (ValueError, RecursionError, MemoryError):
            break
    return [], 0, False


def notebook(statements, name):
    """A program that runs each statement by itself and skips those that fail, as in a notebook.

    It leaves out stubs of function `name`, and trial runs, which might never end. "" if nothing
    defines the function.
    """
    trial, program = re.compile(rf"(?<![\w.])({name}\(|__name__\b)"), ""
    for node in statements:
        definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        last = ast.unparse(node.body[-1]) if getattr(node, "name", "") == name else ""
        stub = re.match(r"pass$|\.\.\.$|raise NotImplementedError|[\"']", last)
        future = getattr(node, "module", "") == "__future__"  # must come first in a program
        if stub or future or not definition and trial.search(ast.unparse(node)):
            continue
        guarded = ast.parse("try: pass\nexcept BaseException: pass")
        guarded.body[0].body = [node]
        program += ast.unparse(guarded) + "\n"
    binds = rf"(?m)\bdef {name}\(|^ *{name}(: .+)? = |\bimport .*\b{name}$"
    return program if re.search(binds, program) else ""


def extract_code(answer: str, prompt: str, function_name: str) -> str:
    """The Python in an instruct model's answer, as a program text to put after the prompt.

    It may be the whole function, with imports, helpers and trial runs, fenced or not, or only the
    body. Code ends where Python ends, so that fences in docstrings do not matter.
    """
    name, text = re.escape(function_name), answer.replace("\r\n", "\n")
    lines = re.split(rf"(?m)(?<=\S)\s*^{CHAT_TOKEN}", text)[0].split("\n")
    fenced = [i + 1 for i, line in enumerate(lines) if FENCE.search(line)]
    cells, i = [], 0
    while i < len(lines):
        kept = 0
        if i in fenced or CODE.match(lines[i]):
            found, kept, complete = parse(lines[i:])
            # What is cut short goes first, so that a complete version replaces it.
            cells = cells + found if complete else found[-1:] + cells + found[:-1]
        i += max(kept, 1)
    program = notebook(cells, name)
    given = prompt.rstrip().split("\n")
    indent = re.match(r"\s*", given[-1])[0] or "    "
    if not program:  # the answer is the body; its first line may have lost its indentation
        indented = [i for i, line in enumerate(lines) if re.match(r"\s+\S", line)]
        bodies = []
        for i in [0, *fenced, *indented[:1]]:
            code = "\n".join(lines[i:])
            bodies += [textwrap.indent(textwrap.dedent(code), indent), indent + code.lstrip()]
        whole = [parse(given + body.split("\n")) for body in bodies if f"def {name}" not in body]
        program = notebook(max(whole, key=lambda found: found[1], default=[[]])[0], name)
    header = "" if parse(given)[1] == len(given) else f"{indent}pass\n"  # without a docstring
    return header + program


def score_function(problem, completion, args):
    prompt, name = problem["code"], problem["entry_point"]
    code = extract_code(completion, prompt, name)
    if not args.run_code:
        return {"extracted": code, "correct": None, "error": "not run"}
    error = run_program(f"{prompt}\n{code}\n{problem['test']}\ncheck({name})\n")
    return {"extracted": code, "correct": error is None, "error": error}


# -------- The sandbox -----------------------------------------------------------------------------

RUN_CODE = (
    "run the programs that the model wrote, in a sandbox without network, with limits on time, "
    "memory and processes; it holds off accidents, not attacks: in doubt, use a virtual machine"
)
SECONDS = 10  # for one program, wall clock
SANDBOX = """
set -e
umask 022
root=/sys  # a folder that every Linux has and no Python lives in
mount -t tmpfs tmpfs $root
mkdir $root/tmp $root/dev
mount -t tmpfs -o mode=1777,size=64m,nr_inodes=9999 tmpfs $root/tmp
for place in /usr /bin /lib /lib32 /lib64 /etc /nix "$@"; do
    test -d "$place" || continue
    mkdir -p "$root$place"
    mount -o rbind,ro,nosuid,nodev "$place" "$root$place"
done
touch $root/dev/null
mount --bind /dev/null $root/dev/null
mount -o remount,bind,ro $root
# As process 1 of its namespace, timeout takes every descendant with it when it ends.
exec timeout -s KILL $SECONDS chroot $root setpriv --reuid $USER --regid $USER $GROUPING \\
    --inh-caps=-all --bounding-set=-all --no-new-privs \\
    prlimit --as=1073741824 --fsize=1048576 --nproc=8 --nofile=64 --core=0 "$PYTHON" -I -c "$CODE"
"""


def execute():
    """Run a program, then print a secret: all that the process in the sandbox does."""
    import json, os, sys

    (source, secret), process = json.load(sys.stdin), os.getpid()
    os.chdir("/tmp")
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
        print(end="", flush=True)
        os.write(1, secret.encode() if os.getpid() == process else b"")  # not by a forked child
    except BaseException as error:
        os.write(1, f"\n{error!r:.300}".encode())
    finally:
        os._exit(0)


def run_program(source: str) -> str | None:
    """Run a program in a sandbox: None if it ran to its end, else why it did not.

    A program may end itself with any status, so the proof is a secret printed after its last line.
    Root runs it as a user whom nobody else is, others as themselves in a user namespace.
    """
    secret, output = secrets.token_hex(16), os.memfd_create("output")
    user, groups, own = "0", "--keep-groups", ["--map-root-user"]
    if os.geteuid() == 0:
        user, groups, own = str(50_000 + os.getpid() % 10_000), "--clear-groups", []
    command = [*"unshare --mount --ipc --net --pid --kill-child".split(), *own, "sh", "-c", SANDBOX]
    command += ["sh", sys.base_prefix, sys.prefix, Path(sys.executable).resolve().parents[1]]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1",
        "USER": user, "GROUPING": groups, "SECONDS": str(SECONDS), "PYTHON": sys.executable,
        "CODE": f"{inspect.getsource(execute)}\nexecute()",
    }
    job = json.dumps([source, secret]).encode()
    with open(output, "rb") as file:
        ran = subprocess.run(command, input=job, stdout=file, stderr=file, env=environment, cwd="/")
        printed = os.pread(output, 2**20, 0).decode(errors="replace")
    if secret in printed:
        return None
    if ran.returncode > 128:
        by = ran.returncode - 128
        return f"took longer than {SECONDS} s" if by == signal.SIGKILL else f"ended by signal {by}"
    if len(printed) >= 2**20:
        return "printed more than 1 MB"
    lines = re.findall(r"(?m)^\S.*", printed)  # without the indented hints of mount
    return lines[-1] if lines else "the program ended before its test did"


def check_sandbox():
    """Refuse to run model-written code where it cannot be held."""
    try:
        error = run_program("import random")
    except (OSError, AttributeError) as missing:  # util-linux or Linux
        error = missing
    require(not error, f"--run-code: no safe way to run programs without namespaces: {error}")


# -------- The run ---------------------------------------------------------------------------------

SETTINGS = "task model weights metric batch_size max_new_tokens dtype".split()  # of a samples file


def fingerprint(model):
    """A checksum of some values of every parameter."""
    some = [p.flatten()[:: p.numel() // 64 + 1].float().cpu() for p in model.parameters()]
    return zlib.crc32(torch.cat(some).detach().numpy().tobytes())


def saved_records(problems, args):
    """The records of an interrupted run, scored anew; the last line may be cut short."""
    path, known, records = Path(args.samples), {p["id"]: p for p in problems}, []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = dict(json.loads(line))
        except (ValueError, TypeError):
            cut = number == len(lines) and line.startswith(b'{"task": ')
            require(cut, f"{path}, line {number} is not of a samples file")
            break
        problem = known.get(record.get("id"), record)
        same = record.get("prompt") == problem.get("prompt")
        require(same, f"{path} was made with another prompt: name another file")
        for name in SETTINGS:
            same = record.get(name) == getattr(args, name)
            require(same, f"{path} was made with another {name}: name another file")
        if problem is not record:
            score = args.score(problem, record["completion"], args)
            record |= {} if score["correct"] is None else score  # None: without --run-code
        records.append(record)
    copy = path.with_name(path.name + ".tmp")
    copy.write_text("".join(json.dumps(record) + "\n" for record in records))
    copy.replace(path)
    return records


def prompt_ids(problems, tokenizer):
    asked = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    return [mars.chat_ids(tokenizer, messages) for messages in asked]


def answers(model, tokenizer, problems, mode, threshold, args):
    """Answer problems with Hugging Face's `generate` or with ours; yields scored records.

    `seconds` is the time since the record before, without scoring: they add up to decoding's.
    """
    prompts, size, longest = prompt_ids(problems, tokenizer), args.batch_size, args.max_new_tokens
    if mode == "hf":  # in fixed batches, whose rows are all done together
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        run = lambda part: mars.hf_generate(model, part, longest, size)
        outs = enumerate(chain.from_iterable(map(run, parts)))
    else:
        options = dict(lossless=mode == "lossless", metric=args.metric, batch_size=size)
        outs = mars.finished(model, prompts, longest, threshold, **options)
    start = perf_counter()
    for index, out in outs:
        seconds, problem = perf_counter() - start, problems[index]
        completion = tokenizer.decode(out.tokens, skip_special_tokens=True)
        record = {name: getattr(args, name) for name in SETTINGS} | {
            "mode": mode, "threshold": threshold, "id": problem["id"], "prompt": problem["prompt"],
            "completion": completion, "steps": out.steps, "stop": out.stop, "seconds": seconds,
        } | args.score(problem, completion, args)
        if args.samples:  # subtle: one write a line, or processes cut each other's lines in two
            with open(args.samples, "ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
        yield record
        start = perf_counter()


def sweep(model, tokenizer, problems, done, args):
    """Answer the problems in every mode and at every threshold; yields the lines of the table."""
    done = {(record["mode"], record["threshold"], record["id"]): record for record in done}
    ar, baseline, (rank, world) = mars.METRICS[args.metric][0], None, mars.processes()
    modes = [("hf", None)] * args.baseline + [("lossless", None)] * args.lossless
    modes[args.baseline : args.baseline] = [("mars", t) for t in dict.fromkeys(args.thresholds)]
    for mode, threshold in modes:
        mode = "ar" if threshold == ar else mode
        mine = {(mode, threshold, problem["id"]): problem for problem in problems[rank::world]}
        todo = [problem for key, problem in mine.items() if key not in done]
        new = answers(model, tokenizer, todo, mode, threshold, args)
        bar = mars.progress(new, desc=f"{mode} {threshold or ''}", total=len(todo), leave=False)
        parts = [[done[key] for key in mine if key in done] + list(bar)] * world
        if world > 1:
            dist.all_gather_object(parts, parts[0])
        records = list(chain(*parts))
        verdicts, n = [record["correct"] for record in records], len(records)
        accuracy = None if None in verdicts else sum(verdicts) / n
        steps = list(chain(*(record["steps"] for record in records)))
        speed = sum(steps) / max(sum(record["seconds"] for record in part) for part in parts)
        baseline = speed if mode == "hf" else baseline
        yield {
            "mode": mode, "threshold": threshold, "batch_size": args.batch_size, "n": n,
            "accuracy": accuracy,
            "standard_error": accuracy and (accuracy * (1 - accuracy) / n) ** 0.5,
            "tokens_per_forward": fmean(steps), "tokens_per_second": speed,
            "speedup": baseline and speed / baseline,
        }


def plot(rows, file, title):
    """Draw the frontier: accuracy, with its standard error, against speed."""
    from matplotlib.figure import Figure

    x, label = "tokens_per_forward", "tokens per forward pass"
    if all(row["speedup"] for row in rows):
        x, label = "speedup", "speedup over Hugging Face generate"
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    curve = [row for row in rows if row["threshold"] is not None]
    axes.plot([row[x] for row in curve], [100 * row["accuracy"] for row in curve])
    for i, row in enumerate(rows):
        point = row[x], 100 * row["accuracy"]
        axes.errorbar(*point, 100 * row["standard_error"], marker="o", color="tab:blue")
        name = row["mode"] if row["threshold"] is None else f"τ = {row['threshold']:g}"
        place = (4, -12 if i % 2 else 6)  # below and above in turn, because neighbours may be close
        axes.annotate(name, point, place, textcoords="offset points", fontsize=8)
    axes.set(xlabel=label, ylabel="accuracy, %", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def check_options(args):
    """Refuse what would fail only at the end."""
    for file in filter(None, (args.json, args.samples, args.plot)):
        require(Path(file).absolute().parent.is_dir(), f"there is no folder for {file}")
    require(args.samples or not args.resume, "--resume continues the file of --samples: name it")
    require((args.plot or ".png").endswith((".png", ".pdf")), "--plot: name a FILE.png")
    require(find_spec("matplotlib") or not args.plot, "--plot: pip install matplotlib")
    scored = args.task != "humaneval" or args.run_code
    require(scored or args.samples and not args.plot, "add --run-code (see --help)")
    there = args.samples and Path(args.samples).exists() and not args.resume
    require(not there, f"{args.samples} exists: add --resume, or name another file")
    if args.task == "humaneval" and args.run_code:
        check_sandbox()


def evaluate(args):
    problems = args.problems(args)
    check_options(args)
    args.dtype = str(mars.pick(args.device, args.dtype)[1]).removeprefix("torch.")
    model, tokenizer = mars.load(args.model, args.device, args.dtype, need_template=True)
    args.weights, masks = fingerprint(model), mars.trained_block_size(model) > 1
    args.thresholds = args.thresholds or mars.METRICS[args.metric][: None if masks else 1]
    for threshold in [*args.thresholds, *[None] * args.lossless]:  # without prompts: a check
        mars.stream(model, [], threshold=threshold, lossless=threshold is None, metric=args.metric)
    with mars.process_group(args.device):
        rank, world = mars.processes()
        resumed = args.resume and rank == 0 and Path(args.samples).exists()
        done = [saved_records(problems, args) if resumed else []]
        if world > 1:
            dist.broadcast_object_list(done)
        title = f"{args.task}, {len(problems)} problems, {args.model}"
        print(f"{title}\n{mars.hardware(model)}")
        names = "mode threshold accuracy standard_error tokens_per_forward tokens_per_second"
        rows = sweep(model, tokenizer, problems, done[0], args)
        rows = mars.print_table(rows, names + " speedup" * args.baseline)
        if rank == 0:
            mars.write_results(args, model, rows)
            if args.plot:
                plot(rows, args.plot, title)


# -------- Load: the knob in the hands of a server -------------------------------------------------

POLICIES = ("fixed-1.0", "fixed-0.9", "lossless", "adaptive")


def serve(model, prompts, due, policy, args):
    """Answer request i, which arrives at second due[i]: (latencies in s, tokens, mean threshold).

    Adaptive: 1 while fewer than four requests wait, 0.95 from four on, 0.9 from eight on.
    """
    start, admitted, asked = perf_counter(), 0, []
    latencies, outs = [0.0] * len(due), [[] for _ in due]

    def arrivals():
        nonlocal admitted
        for prompt, second in zip(prompts, due):
            while perf_counter() - start < second:
                yield None
            admitted += 1
            yield prompt

    def adaptive():
        waiting = sum(second < perf_counter() - start for second in due) - admitted
        asked.append(1 - 0.05 * min(waiting // 4, 2))
        return asked[-1]

    fixed = float(policy[6:]) if policy.startswith("fixed-") else None
    threshold = adaptive if policy == "adaptive" else fixed
    options = dict(lossless=policy == "lossless", batch_size=args.batch_size)
    for i, tokens in mars.stream(model, arrivals(), args.max_new_tokens, threshold, **options):
        outs[i] += tokens
        latencies[i] = perf_counter() - start - due[i]
    return latencies, outs, fmean(asked) if asked else fixed


def load_test(args):
    """Requests arrive at random, up to more than AR decoding answers: what can a policy do?"""
    positive = all(0 < load < math.inf for load in args.rates)
    require(positive, "--rates: a rate is a positive number")
    model, tokenizer = mars.load(args.model, args.device, args.dtype)
    mars.stream(model, [], lossless=True)  # without prompts: a check
    problems = toy_problems(args)
    prompts = prompt_ids(problems, tokenizer)
    for _ in range(2):  # the first time is a warm-up
        at_once = serve(model, prompts, [0.0] * len(prompts), "fixed-1.0", args)
    capacity = len(prompts) / max(at_once[0])
    print(f"AR decoding answers {capacity:.1f} requests a second\n{mars.hardware(model)}")

    def results():
        for load, policy in product(args.rates, POLICIES):
            rng = random.Random(0)  # a Poisson process, the same for every policy
            due = list(accumulate(rng.expovariate(load * capacity) for _ in prompts))
            latencies, outs, threshold = serve(model, prompts, due, policy, args)
            p50, p95 = torch.tensor(latencies).quantile(torch.tensor([0.5, 0.95])).tolist()
            texts = tokenizer.batch_decode(outs, skip_special_tokens=True)
            right = [score_number(p, text, args)["correct"] for p, text in zip(problems, texts)]
            yield {
                "policy": policy, "load": load, "rate": load * capacity, "latency_p50": p50,
                "latency_p95": p95, "throughput": len(due) / max(map(sum, zip(due, latencies))),
                "mean_threshold": threshold, "accuracy": fmean(right),
            }

    columns = "policy load rate throughput latency_p50 latency_p95 mean_threshold accuracy"
    mars.write_results(args, model, mars.print_table(results(), columns))


def main(argv: list[str] | None = None):
    parser = mars.Parser(description=__doc__.split("\n")[0])
    tasks = parser.add_subparsers(required=True, metavar="toy|gsm8k|humaneval|load", dest="task")
    numbers = mars.numbers(float)
    for task, limit, size, problems, score in (
        ("toy", 1000, 32, toy_problems, score_number),
        ("gsm8k", None, 8, gsm8k_problems, score_number),
        ("humaneval", None, 8, humaneval_problems, score_function),
        ("load", 400, 8, None, None),
    ):
        t = tasks.add_parser(task)
        t.set_defaults(run=evaluate if problems else load_test, problems=problems, score=score)
        add = t.add_argument
        add("--limit", type=mars.positive, default=limit, help=f"first problems only ({limit})")
        add("--batch-size", type=mars.positive, default=size, help=f"rows at a time ({size})")
        mars.add_model_options(t)
        if task == "load":
            add("--rates", type=numbers, default="0.5,1,1.25", help="1: as much as AR can answer")
            continue
        if task != "toy":
            add("--data", help="file, folder or hub id NAME[:CONFIG] (default: from the hub)")
        if task == "humaneval":
            add("--run-code", action="store_true", help=RUN_CODE)
        add("--thresholds", type=numbers, help="comma-separated (default: 1.0 and six below)")
        add("--lossless", action="store_true", help="also decode by verified drafts")
        add("--baseline", action="store_true", help="also Hugging Face generate")
        add("--samples", metavar="FILE", help="write a JSON line for every answer")
        add("--resume", action="store_true", help="continue an interrupted run's --samples")
        add("--plot", metavar="FILE.png", help="draw accuracy against speed (matplotlib)")
    mars.run(parser, argv)


if __name__ == "__main__":
    main()
