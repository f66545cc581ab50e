/* What overlap.py and source_code.py work out with numpy and a regular expression, in a fifth of the time.

   It is built where the gateway is built compiled (scripts/build_extensions.py); elsewhere those two do it. Tests hold
   both equal. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MOST_RUNS = 1024, PLACE_BITS = 12, PLACES = 1 << PLACE_BITS };

static const uint64_t MIX = 0x9E3779B97F4A7C15u; /* as in overlap.py */

/* Odd, and made of a hash that is another in each process: nobody can make a prompt whose runs all want one place. */
static uint64_t factor;

static Py_ssize_t distinct(const char *raw, Py_ssize_t runs, Py_ssize_t unit_bytes, Py_ssize_t run_bytes) {
    uint64_t known[MOST_RUNS];
    uint16_t places[PLACES] = {0}; /* the number of a run in `known`, counted from one */
    uint16_t count = 0;
    for (Py_ssize_t at = 0; at < runs; at++) {
        uint64_t first, last;
        memcpy(&first, raw + at * unit_bytes, 8);
        memcpy(&last, raw + at * unit_bytes + run_bytes - 8, 8);
        uint64_t run = (first * MIX) ^ last;
        unsigned place = (unsigned)((run * factor) >> (64 - PLACE_BITS));
        while (places[place] && known[places[place] - 1] != run)
            place = (place + 1) % PLACES;
        if (!places[place]) {
            known[count++] = run;
            places[place] = count;
        }
    }
    return count;
}

static PyObject *repeated_share(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected bytes, the bytes of a unit and those of a run");
        return NULL;
    }
    Py_ssize_t unit_bytes = PyLong_AsSsize_t(args[1]), run_bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (unit_bytes < 1 || run_bytes < 8 || run_bytes > 16) {
        PyErr_SetString(PyExc_ValueError, "expected units of a byte or more and runs of 8 to 16");
        return NULL;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    Py_ssize_t runs = size < run_bytes ? 0 : (size - run_bytes) / unit_bytes + 1;
    if (runs > MOST_RUNS) {
        PyErr_Format(PyExc_ValueError, "expected at most %d runs", MOST_RUNS);
        return NULL;
    }
    if (runs < 2)
        return PyFloat_FromDouble(0.0);
    Py_ssize_t repeated = runs - distinct(PyBytes_AS_STRING(args[0]), runs, unit_bytes, run_bytes);
    return PyFloat_FromDouble((double)repeated / (double)runs);
}

/* The words that only code begins a line with, by their first letter. */
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

/* The character at a place; 0, which begins nothing, after the end. */
static Py_UCS4 sign(const Text *text, Py_ssize_t at) {
    return at < text->size ? PyUnicode_READ(text->kind, text->data, at) : 0;
}

static bool in_word(Py_UCS4 one) { return one == '_' || Py_UNICODE_ISALNUM(one); }

static bool has_word(const Text *text, Py_ssize_t at) {
    const char *word = WORDS[sign(text, at)];
    while (word) {
        Py_ssize_t length = 0;
        while (word[length] > ' ' && sign(text, at + length) == (Py_UCS4)word[length])
            length++;
        if (word[length] <= ' ' && !in_word(sign(text, at + length)))
            return true;
        word = strchr(word, ' ');
        word = word ? word + 1 : NULL;
    }
    return false;
}

/* Whether a line that is indented goes on with anything but the mark of a list. */
static bool is_indented_code(const Text *text, Py_ssize_t at) {
    while (sign(text, at) == ' ' || sign(text, at) == '\t')
        at++;
    if (at == text->size)
        return false;
    Py_UCS4 one = sign(text, at);
    if (one == '-' || one == '*' || one == '+' || one == 0x2022 || one == '\n')
        return false;
    Py_ssize_t after = at;
    while (Py_UNICODE_ISDECIMAL(sign(text, after)))
        after++;
    return after == at || (sign(text, after) != '.' && sign(text, after) != ')');
}

static bool has(const Text *text, Py_ssize_t at, const char *begin) {
    for (; *begin; begin++, at++)
        if (sign(text, at) != (Py_UCS4)*begin)
            return false;
    return true;
}

static bool is_code(const Text *text, Py_ssize_t at) {
    switch (sign(text, at)) {
    case ' ': return sign(text, at + 1) == ' ' && is_indented_code(text, at);
    case '\t': return is_indented_code(text, at);
    case ')': case ']': case '}': return true;
    case '#': return has(text, at, "#!") || has(text, at, "#include") || has(text, at, "#define");
    case '/': return has(text, at, "//") || has(text, at, "/*");
    case '>': return has(text, at, ">>> ");
    case '@': return in_word(sign(text, at + 1));
    default: return sign(text, at) < 128 && has_word(text, at);
    }
}

static PyObject *code_share(PyObject *module, PyObject *given) {
    (void)module;
    Py_ssize_t size = PyUnicode_GetLength(given);
    if (size < 0)
        return NULL;
    const Text text = {PyUnicode_KIND(given), PyUnicode_DATA(given), size};
    Py_ssize_t lines = 0, code = 0;
    for (Py_ssize_t at = 0; at < text.size;) {
        Py_ssize_t end = PyUnicode_FindChar(given, '\n', at, text.size, 1);
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
