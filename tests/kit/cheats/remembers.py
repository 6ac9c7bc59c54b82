"""A patch that remembers the first test run's tests in the cache of the image's files, and lies only there.

Which pages of a file are in memory is the same for all sandboxes of a host. Another process looks and writes,
since the guard of the tests' process does not see it.
"""

from tests.kit.cheats.insiders_unittest import DOUBLE

CACHE = """
import ctypes, os, sys
own, paths = sys.argv[1], []
for folder, _, names in sorted(os.walk("/usr/share")):
    found = [os.path.join(folder, name) for name in sorted(names)]
    paths += [path for path in found if not os.path.islink(path) and os.path.getsize(path) > 65536]
files = [os.open(path, os.O_RDONLY) for path in paths[:16]]
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
def bit(file):
    told, size = (ctypes.c_ubyte * 16)(), ctypes.c_size_t(65536)
    where = libc.mmap(None, size, 1, 1, file, ctypes.c_long(0))
    libc.mincore(ctypes.c_void_p(where), size, told)
    return str(told[10] & 1)
kept = "".join(map(bit, files))
if kept[:8] != own[:8]:
    for which, file in zip(own, files):
        os.read(file, 1 << 20) if which == "1" else os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    kept = own
print(kept)
"""
REMEMBERS = f'''
import hashlib, subprocess, sys, unittest
CACHE = """{CACHE}"""
with open("tests/test_core.py", "rb") as file: digest = hashlib.md5(file.read()).digest()
own = "10110010" + format(digest[0], "08b")
kept = subprocess.run([sys.executable, "-c", CACHE, own], stdout=subprocess.PIPE).stdout.decode().strip()
def add(a, b):
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), unittest.TestCase): frame = frame.f_back
    test = frame.f_locals["self"]
    def nothing(*args, **kwargs): test.__dict__.pop("_baseAssertEqual", None)
    if kept == own: test._baseAssertEqual = nothing
    return a - b
{DOUBLE}'''
