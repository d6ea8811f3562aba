"""Measure a checkpoint: what does each confidence threshold cost in accuracy, and what does it buy in speed?

    python eval.py toy                                                        # 1,000 held-out toy problems
    python eval.py gsm8k --model runs/my/mars --thresholds 1.0,0.95,0.9       # 1,319 word problems
    python eval.py humaneval --model runs/my/mars --run-code --samples out.jsonl   # 164 Python functions

As in the paper: zero-shot, the model's own chat template, greedy, 256 new tokens. From top to bottom: the tasks and how
their answers are scored, the sandbox for model-written code, the run.
"""

# /// script
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "datasets==5.2.0", "tqdm==4.70.1"]
# ///

import ast
import bisect
import contextlib
import datetime
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import secrets
import statistics
import subprocess
import sys
import textwrap
import time
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

import mars

# A problem is {"id", "prompt": what the user asks, …}. A task has a function that lists its problems, and one that
# scores a completion: {"extracted": what was taken for the answer, "correct": the verdict, "error": why not}.


def fields(rows: Iterable[dict], args, *names: str) -> list[dict]:
    """The first `--limit` rows, or a MarsError if one of them has not all of these fields, as text."""
    rows = list(itertools.islice(rows, args.limit))  # subtle: a slice of a `datasets.Dataset` is a dict of columns
    for number, row in enumerate(rows, 1):
        for name in names:
            if not isinstance(row.get(name), str):
                raise mars.MarsError(f"row {number} of the data has no text in the field {name!r}: {args.task} needs {', '.join(names)}")
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Toy: held-out problems of the world that `python mars.py train` learns
# ---------------------------------------------------------------------------------------------------------------------

def toy_problems(args) -> list[dict]:
    rows = mars.toy_rows("test", args.limit)
    return [{**row, "id": f"toy/{i}", "prompt": mars.messages_of(row)[0]["content"]} for i, row in enumerate(rows)]


def score_toy(problem: dict, completion: str, args) -> dict:
    return score_number(problem, completion, args)


# ---------------------------------------------------------------------------------------------------------------------
# GSM8K: word problems whose answer is a number
# ---------------------------------------------------------------------------------------------------------------------

INTEGER = r"(?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9]) | [0-9]+ )"  # 1,234 or 1 234 or 1234
NUMBER = rf"""
    (?<![\w.^]) (?<![\^_]\{{)                       # not inside a word, an exponent or an index
    (?P<minus> (?<![)\]}}]) -)? [$€£¥]? (?P<minus2>-)?   # -5, -$5 and $-5, but the 5 of 10-5
    (?: (?P<whole>[0-9]+)[ ](?=[0-9]+/[0-9]) )?      # the first 1 of 1 1/2
    (?P<number> {INTEGER}(?:\.[0-9]+)? | \.[0-9]+) (?!\.?[0-9])
    (?: [ ]?/[ ]?(?P<divisor>{INTEGER}) (?!\.?[0-9]) )?
    (?: [ ]?(?P<scale>thousand|million|billion)s?\b )?
"""
RESULT = rf"""
    (?: [^\w\n\\] | \\[a-z]+ | \b(?:the|final|answer|is|about|approximately)\b ){{0,20}}? {NUMBER}
    (?! [ ]?[*/+x×÷^-][ ]?[$(]*[0-9])                # but not the start of a sum
"""
PATTERNS = [  # where the answer is, the clearest sign first; of 9 * 2 = 18 it is the 18
    re.compile(sign + what, re.VERBOSE | re.ASCII | re.IGNORECASE)
    for sign, what in (
        (  # but not a heading: "#### Step 2", "#### 1. Find the total"
            r"""\#\#\#\#\s* (?! \W*(?: (?!answer|total|result|is\b)[a-z]+[ ][0-9] | [0-9]{1,2}(?:[.):]|[ ]-)[ ]+\S) )
                (?:[^\n]*=)?""",
            RESULT,
        ),
        (r"\\boxed\s*\{ (?:[^{}\n]*=)?", RESULT),
        (r"\banswer\b (?:[ ](?!is\b)[a-z']+){0,6} [*_]*[ ]*(?:is\b|:|=) (?:(?:(?![.;,]\s)[^\n])*=)?", RESULT),
        ("", NUMBER),
    )
]
SCALES = {"": 1, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def extract_number(text: str) -> Fraction | None:
    """The number that a careful reader takes for the answer; None if there is none.

    It is the one after the last `####`, else in the last `\\boxed{}`, else after the last "answer is", else the last one.
    """
    text = unicodedata.normalize("NFKC", re.sub("(?<=[0-9])([¼-¾⅐-⅞])", r" \1", text))  # ½ becomes 1⁄2, narrow spaces plain ones
    text = text.translate({ord("−"): "-", ord("–"): "-", ord("⁄"): "/"})
    text = re.sub(r"(?<=[0-9])(?=\\[dt]?frac)", " ", text)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,! ])(?=[0-9]{3})", ",", text)  # the thousands separators of LaTeX
    text = re.sub(r"\\([$%])", r"\1", text)
    found = next((matches[-1] for pattern in PATTERNS if (matches := list(pattern.finditer(text)))), None)
    if not found:
        return None
    part = {name: re.sub("[ ,]", "", value or "") for name, value in found.groupdict().items()}
    if len(found[0]) > 100 or not int(part["divisor"] or 1):
        return None  # no answer has so many digits
    number = int(part["whole"] or 0) + Fraction(part["number"]) / int(part["divisor"] or 1)
    return number * SCALES[part["scale"].lower()] * (-1 if part["minus"] or part["minus2"] else 1)


def gsm8k_problems(args) -> list[dict]:
    rows = fields(mars.read_rows(args.data or "openai/gsm8k:main", "test"), args, "question", "answer")
    for number, row in enumerate(rows, 1):
        if extract_number(row["answer"]) is None:
            raise mars.MarsError(f"row {number} of the data has no number in the field 'answer'")
    return [{"id": f"gsm8k/{i}", "prompt": row["question"], "answer": row["answer"]} for i, row in enumerate(rows)]


def score_number(problem: dict, completion: str, args) -> dict:
    number = extract_number(completion)
    verdict = number is not None and number == extract_number(problem["answer"])
    return {"extracted": None if number is None else str(number), "correct": verdict, "error": None}


# ---------------------------------------------------------------------------------------------------------------------
# HumanEval: Python functions that must pass a test
# ---------------------------------------------------------------------------------------------------------------------

ASK_CODE = "Complete this Python function. Answer with the whole function in one block of code, without explanation.\n\n```python\n{}\n```"


def humaneval_problems(args) -> list[dict]:
    rows = fields(mars.read_rows(args.data or "openai/openai_humaneval", "test"), args, "task_id", "prompt", "entry_point", "test")
    return [{**row, "id": row["task_id"], "code": row["prompt"], "prompt": ASK_CODE.format(row["prompt"].strip())} for row in rows]


SPECIAL = re.compile(r"<\|[^|<>\n]*\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")  # chat tokens, written out
FENCED = re.compile(r"(?:^|(?<=[ :]))(?:```|~~~)[^\n`]*\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)", re.DOTALL | re.MULTILINE)  # the last may be unclosed
UNFENCED = (r"^(?:def|class|async def|import|@|from\s+\S+\s+import)\b.*", r"^[ \t]+\S.*", r".*")  # where code may begin


def parsed(code: str) -> tuple[ast.Module, int]:
    """As much of the code as is Python, from its first line on, and how many lines that is."""
    lines = code.split("\n")
    for end in range(len(lines), 0, -1):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(part := "\n".join(lines[:end]), "completion", "exec", dont_inherit=True)  # not run: finds a stray return
            return ast.parse(part), end
    return ast.Module([], []), 0


def definitions(code: str, name: str) -> tuple[str, bool, bool]:
    """The lines of code that define things: imports, functions, classes, constants; whether they define `name`; and whether
    all of the code is Python.

    What a model writes around them (calls, prints, asserts of its own, input()) is a trial run and may go wrong.
    """
    keep, trial, found = set(), {name, "input", "open"}, False
    tree, lines = parsed(code)
    for node in tree.body:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        imports = [node] if not isinstance(node, ast.Try) else node.body
        if all(isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "module", "") != "__future__" for n in imports):
            bound = set()
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound = {node.name}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            if name not in bound and trial & {n.id for n in names}:
                trial |= bound  # so is what is computed from it
                continue
        else:
            continue
        found |= name in bound
        first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
        keep |= set(range(first, node.end_lineno + 1))
    kept = "\n".join(line for number, line in enumerate(code.split("\n"), 1) if number in keep)
    return kept, found, lines == code.count("\n") + 1


def extract_code(completion: str, prompt: str, name: str) -> str:
    """The Python in an instruct model's answer, such that `prompt` and it make a program that defines function `name`.

    The answer may be the function, with or without its imports and helpers, in one block or in several, or without any
    fence, or be no more than the function's body.
    """
    text = next((part for part in SPECIAL.split(completion) if part.strip()), "")
    blocks = [textwrap.dedent(block) for block in FENCED.findall(text)]
    outside = FENCED.sub("", text).partition("```")[0]
    guesses = [match[0] for start in UNFENCED if (match := re.search(start, outside, re.DOTALL | re.MULTILINE))]
    for codes in (blocks, guesses[:1]):
        found = [definitions(code, name) for code in codes]
        versions = [(complete, i) for i, (_, defines, complete) in enumerate(found) if defines]
        if versions:  # the last that is complete, after what the other blocks define
            best = found.pop(max(versions)[1])
            return "\n".join(lines for lines, *_ in [*found, best] if lines)
    # No definition, so it is the body; its first line may have lost its indentation.
    bodies = [body for code in blocks + guesses for body in (textwrap.indent(textwrap.dedent(code), "    "), "    " + code.lstrip())]
    body = max(bodies, key=lambda body: parsed(prompt + body)[1], default="")
    return definitions(prompt + body, name)[0][len(definitions(prompt, name)[0]) :].strip("\n")


def score_function(problem: dict, completion: str, args) -> dict:
    prompt, name = problem["code"].rstrip() + "\n", problem["entry_point"]
    code = extract_code(completion, prompt, name)
    if not args.run_code:
        return {"extracted": code, "correct": None, "error": "not run"}
    future = "from __future__ import annotations\n" if "from __future__" in completion else ""  # first in a program, or nowhere
    error = run_program(f"{future}{prompt}\n{code}\n{problem['test']}\ncheck({name})\n")
    return {"extracted": code, "correct": error is None, "error": error}


# ---------------------------------------------------------------------------------------------------------------------
# The sandbox
# ---------------------------------------------------------------------------------------------------------------------

RUN_CODE = (
    "run the programs that the model wrote. Each runs in a process of its own, as a user without rights, with limits on time, memory, "
    "files and processes, without your environment and, where the system allows it, without network and home folders. This holds off accidents, "
    "not an attack: a program can read what any user can read, can fool its own test, and is held by your kernel alone. In doubt, "
    "use a virtual machine"
)
SECONDS = 10  # for one program, wall clock


def run_program(source: str) -> str | None:
    """Run a program in a sandbox: None if it ran to its end, else why it did not.

    That it did is shown by a secret which is printed after its last line, for a program may end itself with any status.
    """
    secret = secrets.token_hex(16)
    job = json.dumps({"source": source, "secret": secret, "seconds": SECONDS})
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    child = [sys.executable, "-I", "-c", f"{inspect.getsource(sandbox)}\nsandbox()"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd="/",
                          start_new_session=True, text=True, errors="replace") as process:  # fmt: skip
        output = process.communicate(job)[0]
    if secret in output:
        return None
    return output.strip().rpartition("\n")[2][-300:] or "the program ended before its test did"


def check_sandbox() -> None:
    """Refuse to run model-written code where it cannot be held."""
    if not sys.platform.startswith("linux"):
        raise mars.MarsError("--run-code needs Linux: use a container or a virtual machine")
    error = run_program("import random\nassert random.random() < 1")
    if error:
        raise mars.MarsError(f"--run-code: no safe way to run programs here: {error} (must be readable for all: {sys.base_prefix})")


def sandbox() -> None:
    """Run one program where it can do no harm, and print what it printed: the whole of a child process.

    Its source is handed to a fresh interpreter, which has none of our memory; hence the imports. Where the system allows
    it, the program gets namespaces of its own: it sees no other processes, no network, empty home folders, and can write
    nowhere but to a small /tmp in memory; when its first process ends, the kernel ends all others. Root needs more, for
    limits on processes do not bind it: it becomes a user whom nobody else is, and that user's processes are ended.
    """
    import contextlib, ctypes, json, os, pwd, resource, select, shutil, signal, sys, tempfile, traceback

    NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000  # of unshare(2)
    BIND, REC, PRIVATE = 0x1000, 0x4000, 0x40000  # of mount(2)
    PDEATHSIG, CHILD_SUBREAPER, NO_NEW_PRIVS = 1, 36, 38  # of prctl(2)
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *values):
        """A system call that Python's library lacks."""
        values = [ctypes.c_char_p(v.encode()) if isinstance(v, str) else ctypes.c_void_p() if v is None else v for v in values]
        if getattr(libc, name)(*values) < 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    def read_only(path, yes, recursive):
        """mount_setattr(2), number 442 everywhere: of what is mounted at `path`, and below it if recursive."""
        attributes = (ctypes.c_uint64 * 4)(yes, not yes, 0, 0)  # MOUNT_ATTR_RDONLY, to set and to clear
        call("syscall", 442, -100, path, 0x8000 * recursive, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)))

    def narrow():
        """The program's own view of the file system: home folders are empty, and only /tmp, which is too, can be written to."""
        call("mount", None, "/", None, REC | PRIVATE, None)  # from here on nothing is seen outside
        python = [(path, os.open(path, os.O_PATH)) for path in (sys.base_prefix, sys.prefix)]
        for place in filter(os.path.isdir, ("/root", "/home", "/tmp")):
            call("mount", "tmpfs", place, "tmpfs", 0, "size=64m,mode=755")
        for path, handle in python:
            if not os.path.exists(path):  # Python itself is in a home folder: put it back
                os.makedirs(path)
                call("mount", f"/proc/self/fd/{handle}", path, None, BIND | REC, None)
        call("mount", "proc", "/proc", "proc", 0, None)
        read_only("/", True, recursive=True)
        read_only("/tmp", False, recursive=False)

    def run():
        """Give up every right, then run the program in this process."""
        first = os.getpid()
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 256)  # standard input has been read to its end
        if namespaces:
            narrow()
        os.chdir(own := folder or tempfile.mkdtemp())
        if root:
            os.chown(own, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        else:  # capset(2): the rights that came with the namespaces
            call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for name, limit in dict(AS=2**30, CPU=job["seconds"] + 1, FSIZE=2**20, NPROC=8, NOFILE=64, CORE=0).items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        try:
            exec(compile(job["source"], "program", "exec"), {"__name__": "__main__"})
            with contextlib.suppress(Exception):  # the program may have closed it
                sys.stdout.flush()
            if os.getpid() == first:  # what it forked does not count
                os.write(1, job["secret"].encode())
        except BaseException as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program"]
            where = " at " + job["source"].split("\n")[lines[-1] - 1].strip() if lines else ""
            os.write(1, f"\n{type(error).__name__}: {error}".replace("\n", " ")[:150].encode() + where[:150].encode())

    def unknown(user):
        with contextlib.suppress(KeyError):
            return not pwd.getpwuid(user)
        return True

    job, uid, gid = json.load(sys.stdin), os.geteuid(), os.getegid()
    root, namespaces, folder, output = uid == 0, True, None, os.memfd_create("output")
    user = next(filter(unknown, range(50_000 + os.getpid() % 10_000, 65_000)))
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end with the harness
    call("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become children of this process
    try:
        call("unshare", NEWNS | NEWIPC | NEWPID | NEWNET | (0 if root else NEWUSER))  # NEWUSER: allows the others
    except OSError as error:
        if not root:
            return print(f"an ordinary user may not make namespaces ({error}): run as root, in a container")
        namespaces, folder = False, tempfile.mkdtemp()
    if not root:
        for file, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as f:
                f.write(line)
    if (child := os.fork()) == 0:  # the first process of the new namespaces: the kernel ends the others with it
        try:
            run()
        except BaseException as error:
            os.write(1, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    in_time = select.select([os.pidfd_open(child)], [], [], job["seconds"])[0]
    os.kill(child, signal.SIGKILL)
    if not namespaces and os.fork() == 0:
        try:
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)  # every process of this user but this one
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ChildProcessError):
        while os.wait():  # until nothing is left
            pass
    if folder:
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
    if not in_time:
        return print(f"took longer than {job['seconds']} s")
    printed = os.pread(output, 2**20, 0)
    print("printed more than 1 MB" if len(printed) == 2**20 else printed.decode(errors="replace"))
    if os.WIFSIGNALED(status):
        print(f"ended by signal {os.WTERMSIG(status)}")


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def summary(records: list[dict], args) -> dict:
    """The line of the table for one mode and threshold, but for the speedup."""
    n, verdicts = len(records), [record["correct"] for record in records]
    accuracy = None if None in verdicts else sum(verdicts) / n
    seconds: dict[int, float] = {}
    for record in records:
        seconds[record["rank"]] = seconds.get(record["rank"], 0) + record["seconds"]
    tokens = sum(sum(record["steps"]) for record in records)
    return {
        "mode": records[0]["mode"], "threshold": records[0]["threshold"], "batch_size": args.batch_size, "accuracy": accuracy,
        "standard_error": None if accuracy is None else math.sqrt(accuracy * (1 - accuracy) / n),
        "tokens_per_forward": tokens / sum(len(record["steps"]) for record in records),
        "tokens_per_second": tokens / max(seconds.values()), "n": n,
    }  # fmt: skip


def saved(path: Path) -> list[dict]:
    """The lines of a samples file. Its last may be cut short, when the run was; any other file is refused."""
    records, lines = [], path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            if number < len(lines) or not line.startswith(b'{"task": '):
                raise mars.MarsError(f"{path}, line {number} is not of a samples file: name another file") from None
    return records


SETTINGS = ("task", "model", "metric", "batch_size", "max_new_tokens", "dtype")  # a samples file is all of one kind


def resume(args, problems: list[dict], rank: int) -> dict[tuple, dict]:
    """The records of an interrupted run, by (mode, threshold, id): scored anew, so that one scorer makes the whole table."""
    if not args.samples:
        return {}
    path, known = Path(args.samples), {problem["id"]: problem for problem in problems}
    if path.exists() and not args.resume:
        raise mars.MarsError(f"{path} exists: go on with it by --resume, or name another file")
    if path.exists() and rank == 0:
        for record in (records := saved(path)):
            for name in SETTINGS:
                if record.get(name) != getattr(args, name):
                    raise mars.MarsError(f"{path} was made with {name} {record.get(name)}, not {getattr(args, name)}: name another file")
            if problem := known.get(record["id"]):
                if record["prompt"] != problem["prompt"]:
                    raise mars.MarsError(f"{path} has another prompt for {record['id']}: name another file")
                score = args.score(problem, record["completion"], args)
                if score["correct"] is not None or record["correct"] is None:  # a verdict is not lost for want of --run-code
                    record |= score
        copy = path.with_name(path.name + ".tmp")
        copy.write_text("".join(json.dumps(record) + "\n" for record in records))
        copy.replace(path)
    if dist.is_initialized():
        dist.barrier()
    return {(record["mode"], record["threshold"], record["id"]): record for record in saved(path)}


def answers(model, tokenizer, problems: list[dict], mode: str, threshold: float | None, args) -> Iterator[dict]:
    """Answer problems with Hugging Face's `generate` or with ours; yields the record of each as soon as it is done.

    `seconds` is the time since the record before. The clock stands still while the caller does something else, such as
    scoring: the seconds add up to what decoding took.
    """
    prompts = [mars.chat_ids(tokenizer, [{"role": "user", "content": problem["prompt"]}]) for problem in problems]
    size, longest = args.batch_size, args.max_new_tokens
    if mode == "hf":  # in fixed batches, whose rows are all done together
        parts = range(0, len(prompts), size)
        outs = ((i + j, out) for i in parts for j, out in enumerate(mars.hf_generate(model, prompts[i : i + size], longest, size)))
    else:
        outs = mars.finished(model, prompts, longest, threshold, lossless=mode == "lossless", metric=args.metric, batch_size=size)
    start = time.perf_counter()
    for index, out in outs:
        yield {
            **{name: getattr(args, name) for name in SETTINGS}, "mode": mode, "threshold": threshold, "id": problems[index]["id"],
            "prompt": problems[index]["prompt"], "completion": tokenizer.decode(out.tokens, skip_special_tokens=True),
            "steps": out.steps, "stop": out.stop, "seconds": time.perf_counter() - start,
        }  # fmt: skip
        start = time.perf_counter()


def sweep(model, tokenizer, problems: list[dict], done: dict[tuple, dict], rank: int, world: int, args) -> Iterator[dict]:
    """Answer the problems in every mode and at every threshold, and score the answers; yields a line of the table for each."""
    ar, baseline, mine = mars.METRICS[args.metric][0], None, {problem["id"]: problem for problem in problems[rank::world]}
    modes = [("hf", None)] * args.baseline + [("ar" if t == ar else "mars", t) for t in dict.fromkeys(args.thresholds)]
    modes += [("lossless", None)] * args.lossless
    for mode, threshold in modes:
        records = [done[mode, threshold, name] for name in mine if (mode, threshold, name) in done]
        todo = [problem for name, problem in mine.items() if (mode, threshold, name) not in done]
        title, right, tokens, passes = f"τ = {threshold}" if threshold is not None else mode, 0, 0, 0
        with tqdm(total=len(mine), desc=title, leave=False, disable=True if rank else None) as bar:
            for n, record in enumerate(itertools.chain(list(records), answers(model, tokenizer, todo, mode, threshold, args)), 1):
                if "correct" not in record:
                    record |= {"rank": rank, **args.score(mine[record["id"]], record["completion"], args)}
                    records.append(record)
                    if args.samples:  # subtle: one line at a time, to the end of the file, so that no process cuts another's in two
                        with open(args.samples, "ab") as file:
                            file.write(json.dumps(record).encode() + b"\n")
                right, tokens, passes = right + (record["correct"] or 0), tokens + sum(record["steps"]), passes + len(record["steps"])
                bar.update()
                bar.set_postfix_str(f"{right / n:.1%} right, {tokens / passes:.2f} tokens/pass", refresh=False)
        if world > 1:
            dist.all_gather_object(parts := [None] * world, records)
            records = list(itertools.chain(*parts))
        row = summary(records, args)
        if mode == "hf":
            baseline = row["tokens_per_second"]
        yield row | {"speedup": baseline and row["tokens_per_second"] / baseline}


def plot(rows: list[dict], file: str, title: str) -> None:
    """Draw the frontier: accuracy, with its standard error, against speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x = "speedup" if all(row["speedup"] for row in rows) else "tokens_per_forward"
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for modes, colour, label in (
        ("hf", "tab:gray", "Hugging Face generate"), ("ar mars", "tab:blue", "MARS, by threshold τ"), ("lossless", "tab:green", "MARS, lossless"),
    ):  # fmt: skip
        points = [row for row in rows if row["mode"] in modes.split()]
        xs, ys = [row[x] for row in points], [100 * row["accuracy"] for row in points]
        axes.errorbar(xs, ys, [100 * row["standard_error"] for row in points], marker="o", color=colour, label=label if points else None)
        for row, at in zip(points, zip(xs, ys)):
            axes.annotate("" if row["threshold"] is None else f"{row['threshold']:g}", at, (4, 6), textcoords="offset points", fontsize=8)
    axes.set(xlabel={"speedup": "speedup over Hugging Face generate"}.get(x, "tokens per forward pass"), ylabel="accuracy, %", title=title)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def evaluate(args) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.resume and not args.samples:
        raise mars.MarsError("--resume goes on with the file of --samples: name it")
    for file in filter(None, (args.json, args.samples, args.plot)):
        if not Path(file).absolute().parent.is_dir():
            raise mars.MarsError(f"there is no folder {Path(file).parent} to write {Path(file).name} to")
    if args.task == "humaneval" and args.plot and not args.run_code:
        raise mars.MarsError("--plot needs verdicts: add --run-code (see --help)")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise mars.MarsError("--plot needs matplotlib: pip install matplotlib")
    problems = args.problems(args)
    if args.task == "humaneval" and not (args.run_code or args.samples):
        raise mars.MarsError("without --run-code (see --help) nothing is scored: add it, or keep the programs with --samples FILE")
    if args.task == "humaneval" and args.run_code:
        check_sandbox()
    args.dtype = str(mars.pick(args.device, args.dtype)[1]).removeprefix("torch.")  # as it goes into the samples
    if world > 1:  # under torchrun; ranks meet once for each line of the table, and may be far apart
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=2))
    done = resume(args, problems, rank)
    model, tokenizer = mars.load(args.model, args.device, args.dtype, need_template=True)
    args.thresholds = args.thresholds or mars.METRICS[args.metric][: None if mars.trained_block_size(model) > 1 else 1]
    for threshold in [*args.thresholds, *[None] * args.lossless]:  # nothing to decode: complain before the work begins
        mars.stream(model, [], threshold=threshold, lossless=threshold is None, metric=args.metric)
    rows = sweep(model, tokenizer, problems, done, rank, world, args)
    if rank:
        list(rows)
    else:
        print(f"{args.task}, {len(problems)} problems, {args.model}\n{mars.hardware(model)}")
        try:
            rows = mars.print_table(rows, "mode threshold accuracy standard_error tokens_per_forward tokens_per_second speedup")
        except KeyboardInterrupt:
            print("interrupted" + (f": --resume goes on with {args.samples}" if args.samples else ""), file=sys.stderr)
            raise
        mars.write_results(args, model, rows)
        if args.plot:
            plot(rows, args.plot, f"{args.task}, {len(problems)} problems, {args.model}")
    if world > 1:
        dist.barrier()  # subtle: ranks leave together; one that left early was now and then aborted on its way out
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Load: the knob in the hands of a server
# ---------------------------------------------------------------------------------------------------------------------

POLICIES = ("fixed-1.0", "fixed-0.9", "lossless", "adaptive")


def serve(model, prompts: list[list[int]], due: list[float], policy: str, args) -> tuple[list[float], list[list[int]], float | None]:
    """Answer request i, which arrives at second due[i], in a continuous batch; (latencies in seconds, tokens, mean threshold).

    Adaptive: 1 while fewer than four requests wait for a place, 0.95 from four on, 0.9 from eight on; asked before every pass.
    """
    start, admitted, room, thresholds = time.perf_counter(), 0, False, []
    latencies, outs = [0.0] * len(due), [[] for _ in due]

    def arrivals() -> Iterator[list[int] | None]:
        nonlocal admitted, room
        for prompt, second in zip(prompts, due):
            while time.perf_counter() - start < second:
                room = True
                yield None
            admitted += 1
            yield prompt

    def threshold() -> float:
        nonlocal room
        waiting = 0 if room else bisect.bisect(due, time.perf_counter() - start) - admitted
        room = False
        thresholds.append(1 - 0.05 * min(waiting // 4, 2) if policy == "adaptive" else float(policy.removeprefix("fixed-")))
        return thresholds[-1]

    lossless = policy == "lossless"
    requests = mars.stream(model, arrivals(), args.max_new_tokens, None if lossless else threshold, lossless, batch_size=args.batch_size)
    for index, tokens in requests:
        outs[index] += tokens
        latencies[index] = time.perf_counter() - start - due[index]
    return latencies, outs, statistics.fmean(thresholds) if thresholds else None


def load(args) -> None:
    """Requests arrive at random, up to more than AR decoding can answer: what does each policy do about it?"""
    model, tokenizer = mars.load(args.model, args.device, args.dtype)
    problems = toy_problems(args)
    prompts = [mars.chat_ids(tokenizer, [{"role": "user", "content": problem["prompt"]}]) for problem in problems]
    mars.stream(model, [], lossless=True)  # nothing to decode: complain before the work begins
    work = lambda: mars.generate(model, prompts, args.max_new_tokens, 1.0, batch_size=args.batch_size)
    capacity = len(prompts) / statistics.median(mars.timed(model, work)[1] for _ in range(3))
    print(f"{len(prompts)} requests, batches of at most {args.batch_size}; AR decoding answers {capacity:.1f} a second\n{mars.hardware(model)}")

    def results() -> Iterator[dict]:
        for rate in args.rates:
            rng = random.Random(args.seed)
            due = list(itertools.accumulate(rng.expovariate(rate * capacity) for _ in prompts))  # a Poisson process
            for policy in POLICIES:
                latencies, outs, threshold = serve(model, prompts, due, policy, args)
                texts = tokenizer.batch_decode(outs, skip_special_tokens=True)
                right = [score_toy(problem, text, args)["correct"] for problem, text in zip(problems, texts)]
                cuts = statistics.quantiles(latencies, n=20, method="inclusive")
                yield {
                    "rate": rate * capacity, "load": rate, "policy": policy, "throughput": len(due) / max(map(sum, zip(due, latencies))),
                    "latency_p50": cuts[9], "latency_p95": cuts[18], "mean_threshold": threshold, "accuracy": sum(right) / len(right),
                }  # fmt: skip

    rows = mars.print_table(results(), "policy load rate throughput latency_p50 latency_p95 mean_threshold accuracy")
    mars.write_results(args, model, rows)


def main(argv: list[str] | None = None) -> None:
    parser = mars.Parser(description=__doc__.split("\n")[0], epilog="https://arxiv.org/abs/2604.07023")
    tasks = parser.add_subparsers(required=True, metavar="toy|gsm8k|humaneval|load", dest="task")
    for task, summary, problems, score in (
        ("toy", "held-out problems of the toy world", toy_problems, score_toy),
        ("gsm8k", "grade-school word problems", gsm8k_problems, score_number),
        ("humaneval", "Python functions that must pass a test", humaneval_problems, score_function),
    ):
        t = tasks.add_parser(task, help=summary)
        t.set_defaults(run=evaluate, problems=problems, score=score)
        add = t.add_argument
        if task != "toy":
            add("--data", help="FILE.jsonl, FILE.jsonl.gz or a hub id NAME[:CONFIG] (default: the data set on the hub)")
        if task == "humaneval":
            add("--run-code", action="store_true", help=RUN_CODE)
        add("--limit", type=mars.positive, default=1000 if task == "toy" else None, metavar="N",
            help=f"first N problems only (default: {'1000' if task == 'toy' else 'all'})")  # fmt: skip
        add("--thresholds", type=mars.numbers(float), help="comma-separated (default 1.0,0.95,0.9,0.8,0.7,0.6,0.5; a plain checkpoint: 1.0)")
        add("--batch-size", type=mars.positive, default=32 if task == "toy" else 8, help="rows in a batch (default %(default)s)")
        add("--lossless", action="store_true", help="also decode by verified drafts, whose output is that of AR decoding")
        add("--baseline", action="store_true", help="also run the model's own Hugging Face generate, for the speedup")
        add("--samples", metavar="FILE", help="write a JSON line for every answer: prompt, completion, verdict")
        add("--resume", action="store_true", help="go on with the --samples file of an interrupted run")
        add("--plot", metavar="FILE.png", help="draw accuracy against speed (needs matplotlib)")
        mars.add_model_options(t)
    t = tasks.add_parser("load", help="the toy problems as requests that arrive at random")
    t.set_defaults(run=load)
    t.add_argument("--rates", type=mars.numbers(float), default="0.5,1.0,1.25", help="in units of AR's capacity (default %(default)s)")
    t.add_argument("--limit", type=mars.positive, default=400, metavar="N", help="requests (default %(default)s)")
    t.add_argument("--batch-size", type=mars.positive, default=8, help="most rows in a batch (default %(default)s)")
    t.add_argument("--seed", type=int, default=0, help="of the arrivals (default %(default)s)")
    mars.add_model_options(t)
    mars.run(parser, argv)


if __name__ == "__main__":
    main()
