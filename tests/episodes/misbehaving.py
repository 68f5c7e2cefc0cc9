"""The source of environments and tools that hang, crash, leak or attack, each played in a process of its own."""

SOURCE = '''
import asyncio, dataclasses, os, pickle, random, signal, subprocess, sys, time, types
import numpy
from flowrl.episodes import Environment, InvalidToolCall, Reply

FOLDER = os.path.dirname(__file__)

def note(name, text):
    with open(os.path.join(FOLDER, name), "a") as file:
        file.write(f"{text}\\n")

class Counts(Environment):
    """Keeps a state of its own."""
    def reset(self, row):
        self.total, self.name, self.attempt, self.number = 0, row.row_id, row.attempt, row.ground_truth
        note("pids", os.getpid())
        return Reply(row.messages)

    async def step(self, answer):
        self.total += 1
        if self.total == 2:
            self.misbehave()
        return Reply(f"{self.total}", reward=float(self.total), done=self.total == 3)

    def misbehave(self): ...

    def close(self):
        note("closed", self.name)

class Hangs(Counts):
    """In the first try of odd rows, in C, with a child in a session of its own."""
    def misbehave(self):
        if self.number % 2 and not self.attempt:
            note("pids", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            signal.sigwait([signal.SIGUSR1])

class Blocks(Counts):
    """A coroutine that blocks, and swallows what would cancel it."""
    async def step(self, answer):
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass

class Shares(Environment):
    """Appends to a class attribute and blocks in a coroutine; in separate processes, neither affects other episodes."""
    texts = []
    async def step(self, answer):
        self.texts.append(answer.text)
        time.sleep(0.05)
        return Reply("on", reward=float(len(self.texts)), done=answer.turn == 1)

class Crashes(Counts):
    def misbehave(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class Leaves(Counts):
    def misbehave(self):
        sys.exit(3)

class Raises(Counts):
    def misbehave(self):
        raise KeyError("planted")

class Odd(Environment):
    def step(self, answer):
        return "a text"

class Unsendable(Environment):
    def step(self, answer):
        return Reply([{"role": "user", "content": "x", "by": lambda: 0}])

class Attack:
    """Runs code where it is unpickled."""
    def __reduce__(self):
        return os.system, (f"touch {FOLDER}/attacked",)

class AttackError(Exception):
    def __reduce__(self):
        return os.system, (f"touch {FOLDER}/attacked",)

@dataclasses.dataclass
class AttackReply:
    messages: object
    reward: object = None
    done: bool = False

class AttacksByMessage(Environment):
    def step(self, answer):
        return Reply([{"role": "user", "content": Attack()}])

class AttacksByReward(Environment):
    def step(self, answer):
        return Reply("x", reward=Attack())

class AttacksByError(Environment):
    def step(self, answer):
        raise AttackError(Attack())

class AttacksByDataclass(Environment):
    def step(self, answer):
        return AttackReply(Attack())

def sockets():
    return [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) >= 100
            and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]

class AttacksBySocket(Environment):
    """Writes a pickle, with the length of one, to every socket."""
    def step(self, answer):
        body = pickle.dumps(("is", Attack()))
        for fd in sockets():
            os.write(fd, len(body).to_bytes(8, "big") + body)
        time.sleep(1000)

class Forges(Environment):
    """Writes a reply that is none to every socket."""
    body = b'["is", 5]'

    def step(self, answer):
        for fd in sockets():
            os.write(fd, len(self.body).to_bytes(8, "big") + self.body)
        return Reply("x", done=True)

class ForgesDone(Forges):
    body = b'["is", ["x", 1.0, "yes"]]'

class ForgesReward(Forges):
    body = b'["is", ["x", 1e999, false]]'

class ForgesRaised(Forges):
    body = b'["raised", 5]'

class ForgesFacts(Forges):
    body = b'["raised", {"message": "forged", "code": "c", "facts": {"message": "x", "self": 1, "code": 2, "k": 3}}]'

class Announces(Environment):
    """Announces more than fits into memory."""
    def step(self, answer):
        for fd in sockets():
            os.write(fd, (1 << 60).to_bytes(8, "big"))
        time.sleep(1000)

class Truncates(Environment):
    """Dies within a reply."""
    def step(self, answer):
        for fd in sockets():
            os.write(fd, (100).to_bytes(8, "big") + b'["is",')
        os._exit(0)

class Floods(Environment):
    def step(self, answer):
        return Reply("x" * 20_000_000)

class Nests(Environment):
    def step(self, answer):
        value = []
        for _ in range(100_000):
            value = [value]
        return Reply([{"role": "user", "content": value}])

class Closes(Environment):
    """Closes all descriptors."""
    def step(self, answer):
        os.closerange(3, 4096)
        return Reply("x", done=True)

class Unreadable(Environment):
    def step(self, answer):
        class Broken(Exception):
            def __str__(self):
                raise ValueError
        raise Broken

class Exact(Environment):
    """Numbers and text that must arrive unchanged."""
    def step(self, answer):
        text = "\\u00e4 \\u2028 \\U0001f99c \\x00 <tool_call>"
        message = types.MappingProxyType({"role": "user", "content": text})
        return Reply((message,), reward=numpy.float64(0.1) + 0.2, done=answer.turn == 1)

class Prints(Counts):
    def misbehave(self):
        print("printed")
        os.write(1, b"written")
        assert sys.stdin.read() == ""

class Forks(Counts):
    def misbehave(self):
        os.fork()

class Draws(Environment):
    def step(self, answer):
        return Reply(f"{random.random()} {numpy.random.random()}", reward=random.random(), done=answer.turn == 1)

class DrawsAgain(Draws):
    """Fails in its first try."""
    def reset(self, row):
        self.attempt = row.attempt
        return super().reset(row)

    def step(self, answer):
        note("drawn", random.random())
        note("drawn", numpy.random.random())
        if not self.attempt:
            raise OSError
        return Reply(done=True)

class Loops(Environment):
    """What it opens belongs to one event loop."""
    async def reset(self, row):
        self.loop = asyncio.get_running_loop()
        return Reply(row.messages)

    async def step(self, answer):
        return Reply(done=asyncio.get_running_loop() is self.loop)

def add(a: int, b: int) -> dict:
    """The sum, and the id of its process."""
    return {"sum": a + b, "pid": os.getpid()}

def hang(a: int) -> int:
    time.sleep(1000)

def attack(a: int) -> object:
    return Attack()

def attack_deep(a: int) -> object:
    return {"result": [1, Attack()]}

def picky(a: int) -> int:
    raise InvalidToolCall("no, not that")
'''
