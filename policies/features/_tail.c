/* The computations of overlap.py and code_share.py, in a fifth of the time of numpy and a regular expression.

   Part of a compiled build (scripts/build_extensions.py); without it, those modules compute the same in Python.
   tests/extensions/test_tail.py checks that both agree. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MAX_RUNS = 1024, SLOT_BITS = 12, SLOTS = 1 << SLOT_BITS };

static const uint64_t MIX = 0x9E3779B97F4A7C15u; /* as in overlap.py */

/* Odd, and derived from a hash that differs per process, so that no client can craft a prompt full of collisions. */
static uint64_t factor;

static Py_ssize_t distinct(const char *raw, Py_ssize_t runs, Py_ssize_t unit_bytes, Py_ssize_t run_bytes) {
    uint64_t known[MAX_RUNS];
    uint16_t slots[SLOTS] = {0}; /* index of a run in `known`, plus one; 0 if free */
    uint16_t count = 0;
    for (Py_ssize_t at = 0; at < runs; at++) {
        uint64_t first, last;
        memcpy(&first, raw + at * unit_bytes, 8);
        memcpy(&last, raw + at * unit_bytes + run_bytes - 8, 8);
        uint64_t run = (first * MIX) ^ last;
        unsigned slot = (unsigned)((run * factor) >> (64 - SLOT_BITS));
        while (slots[slot] && known[slots[slot] - 1] != run)
            slot = (slot + 1) % SLOTS;
        if (!slots[slot]) {
            known[count++] = run;
            slots[slot] = count;
        }
    }
    return count;
}

static PyObject *repeated_share(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected bytes, the size of a unit and the size of a run");
        return NULL;
    }
    Py_ssize_t unit_bytes = PyLong_AsSsize_t(args[1]), run_bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (unit_bytes < 1 || run_bytes < 8 || run_bytes > 16) {
        PyErr_SetString(PyExc_ValueError, "expected units of at least 1 byte and runs of 8 to 16 bytes");
        return NULL;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    Py_ssize_t runs = size < run_bytes ? 0 : (size - run_bytes) / unit_bytes + 1;
    if (runs > MAX_RUNS) {
        PyErr_Format(PyExc_ValueError, "expected at most %d runs", MAX_RUNS);
        return NULL;
    }
    if (runs < 2)
        return PyFloat_FromDouble(0.0);
    Py_ssize_t repeated = runs - distinct(PyBytes_AS_STRING(args[0]), runs, unit_bytes, run_bytes);
    return PyFloat_FromDouble((double)repeated / (double)runs);
}

/* Words at the start of a line that indicate code, by first letter. */
static const char *const WORDS[128] = {
    ['C'] = "CREATE", ['I'] = "INSERT", ['S'] = "SELECT", ['a'] = "async", ['c'] = "class const", ['d'] = "def",
    ['e'] = "export enum", ['f'] = "from function func fn", ['i'] = "import impl interface", ['l'] = "let",
    ['n'] = "namespace", ['p'] = "public private protected pub package", ['r'] = "return", ['s'] = "static struct",
    ['t'] = "typedef template", ['u'] = "using", ['v'] = "var void",
};

typedef struct {
    int kind;
    const void *data;
    Py_ssize_t size;
} Text;

/* Return the character at a position, or 0 after the end. */
static Py_UCS4 character(const Text *text, Py_ssize_t at) {
    return at < text->size ? PyUnicode_READ(text->kind, text->data, at) : 0;
}

static bool in_word(Py_UCS4 point) { return point == '_' || Py_UNICODE_ISALNUM(point); }

static bool has_word(const Text *text, Py_ssize_t at) {
    const char *word = WORDS[character(text, at)];
    while (word) {
        Py_ssize_t length = 0;
        while (word[length] > ' ' && character(text, at + length) == (Py_UCS4)word[length])
            length++;
        if (word[length] <= ' ' && !in_word(character(text, at + length)))
            return true;
        word = strchr(word, ' ');
        word = word ? word + 1 : NULL;
    }
    return false;
}

/* Return whether an indented line starts with anything but a list marker. */
static bool is_indented_code(const Text *text, Py_ssize_t at) {
    while (character(text, at) == ' ' || character(text, at) == '\t')
        at++;
    if (at == text->size)
        return false;
    Py_UCS4 point = character(text, at);
    if (point == '-' || point == '*' || point == '+' || point == 0x2022 || point == '\n')
        return false;
    Py_ssize_t after = at;
    while (Py_UNICODE_ISDECIMAL(character(text, after)))
        after++;
    return after == at || (character(text, after) != '.' && character(text, after) != ')');
}

static bool has(const Text *text, Py_ssize_t at, const char *prefix) {
    for (; *prefix; prefix++, at++)
        if (character(text, at) != (Py_UCS4)*prefix)
            return false;
    return true;
}

static bool is_code(const Text *text, Py_ssize_t at) {
    switch (character(text, at)) {
    case ' ': return character(text, at + 1) == ' ' && is_indented_code(text, at);
    case '\t': return is_indented_code(text, at);
    case ')': case ']': case '}': return true;
    case '#': return has(text, at, "#!") || has(text, at, "#include") || has(text, at, "#define");
    case '/': return has(text, at, "//") || has(text, at, "/*");
    case '>': return has(text, at, ">>> ");
    case '@': return in_word(character(text, at + 1));
    default: return character(text, at) < 128 && has_word(text, at);
    }
}

static PyObject *code_share(PyObject *module, PyObject *string) {
    (void)module;
    Py_ssize_t size = PyUnicode_GetLength(string);
    if (size < 0)
        return NULL;
    const Text text = {PyUnicode_KIND(string), PyUnicode_DATA(string), size};
    Py_ssize_t lines = 0, code = 0;
    for (Py_ssize_t at = 0; at < text.size;) {
        Py_ssize_t end = PyUnicode_FindChar(string, '\n', at, text.size, 1);
        if (end == -2)
            return NULL;
        if (end == -1)
            end = text.size;
        if (end > at) {
            lines++;
            code += is_code(&text, at);
        }
        at = end + 1;
    }
    return PyFloat_FromDouble(lines ? (double)code / (double)lines : 0.0);
}

static PyMethodDef methods[] = {
    {"repeated_share", (PyCFunction)(void (*)(void))repeated_share, METH_FASTCALL,
     "repeated_share($module, raw, unit_bytes, run_bytes, /)\n--\n\nReturn the share of runs that occur earlier."},
    {"code_share", code_share, METH_O,
     "code_share($module, text, /)\n--\n\nReturn the share of a text's lines that begin like source code, 0 to 1."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "policies.features._tail", .m_methods = methods,
};

PyMODINIT_FUNC PyInit__tail(void) {
    PyObject *name = PyUnicode_FromString(definition.m_name);
    Py_hash_t hash = name ? PyObject_Hash(name) : -1;
    Py_XDECREF(name);
    if (hash == -1)
        return NULL;
    factor = (uint64_t)hash | 1;
    return PyModuleDef_Init(&definition);
}
