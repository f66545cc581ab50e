/* What units.py and hashes.py do in numpy, in one pass: cut texts into units, find the hashes of those hashed before, and
   write them in base64.

   It is built where the gateway is built compiled, for processors that put the lowest byte first
   (scripts/build_extensions.py); elsewhere those two do it. Tests hold both equal. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PLACE_BITS = 16, HASH_BITS = 24, SIGNS = HASH_BITS / 6, BYTES = 256, SECRETS = 4, SHORT = 1 << 14 };

/* Kinds of bytes, each a bit: those of units.py, whose two kinds of blanks are one here. */
enum { BLANK = 1 << 0, LETTER = 1 << 1, DIGIT = 1 << 2, ALONE = 1 << 5, CONTINUED = 1 << 6 };

/* A unit is known by its bytes; one of more than 16 by a keyed hash of them. */
typedef struct {
    uint64_t first, second;
    uint32_t size;
} Unit;

typedef char Packed[SIGNS]; /* a hash in base64 */

typedef struct {
    Unit unit;
    Packed packed;
} Known;

typedef struct {
    PyObject_HEAD
    Known (*known)[2]; /* of the units that have the same place, the two seen last */
    uint64_t secrets[SECRETS]; /* two odd factors for places, and the key of the hash: nobody else can foresee either */
    uint8_t kinds[BYTES];
    bool is_busy;
} Memory;

typedef struct {
    PyObject *owner;
    const uint8_t *data;
    Packed *packed;
    size_t size, at, units; /* the unit after the first `units` begins at `at` */
} Text;

static uint64_t eight(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* How many of eight bytes, from the first on, are ASCII letters or `_`. */
static size_t letters(uint64_t word) {
    const uint64_t each = 0x0101010101010101u, high = 0x80 * each;
    uint64_t lower = (word & ~high) | 0x20 * each;
    uint64_t is_letter = (lower + (0x80 - 'a') * each) & ~(lower + (0x80 - 'z' - 1) * each);
    uint64_t is_no_line = ((word & ~high) ^ '_' * each) + 0x7F * each;
    uint64_t others = (~(is_letter | ~is_no_line) | word) & high;
    return others ? (size_t)__builtin_ctzll(others) / 8 : 8;
}

/* The place after the unit that begins at `at`. (What is done for each unit is inlined: a quarter less time.) */
static inline size_t unit_end(const uint8_t *kinds, const uint8_t *data, size_t at, size_t size) {
    if (data[at] == ' ' && at + 1 < size && kinds[data[at + 1]] != BLANK)
        at++; /* a single blank goes with what follows it */
    uint8_t kind = kinds[data[at]], goes_on = (kind & ~ALONE) | CONTINUED;
    if (kind == DIGIT && size - at > 3)
        size = at + 3;
    at++;
    if (kind == LETTER)
        for (size_t more = 8; more == 8 && size - at >= 8; at += more)
            more = letters(eight(data + at));
    while (at < size && kinds[data[at]] & goes_on)
        at++;
    return at;
}

/* Up to eight bytes; what is beyond them is read if the text goes that far, and masked out. */
static uint64_t word_of(const uint8_t *data, size_t size, const uint8_t *text_end) {
    if (text_end - data >= 8)
        return eight(data) & (UINT64_MAX >> (64 - 8 * size));
    uint64_t word = 0;
    memcpy(&word, data, size);
    return word;
}

static uint64_t turned(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

static void sip_round(uint64_t v[4]) {
    v[0] += v[1];
    v[2] += v[3];
    v[1] = turned(v[1], 13) ^ v[0];
    v[3] = turned(v[3], 16) ^ v[2];
    v[0] = turned(v[0], 32) + v[3];
    v[2] += v[1];
    v[1] = turned(v[1], 17) ^ v[2];
    v[3] = turned(v[3], 21) ^ v[0];
    v[2] = turned(v[2], 32);
}

/* SipHash-1-3 (Aumasson and Bernstein, 2012). */
static uint64_t sip_hash(const uint64_t key[2], const uint8_t *data, size_t size) {
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
                     key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
    uint64_t word;
    for (size_t at = 0; at <= size; at += 8) {
        if (size - at >= 8) {
            word = eight(data + at);
        } else {
            word = (uint64_t)size << 56;
            memcpy(&word, data + at, size - at);
        }
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for (int round = 0; round < 3; round++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static inline Unit unit_of(const Memory *self, const uint8_t *data, size_t size, const uint8_t *text_end) {
    Unit unit = {0, 0, size < UINT32_MAX ? (uint32_t)size : UINT32_MAX};
    if (size <= 8) {
        unit.first = word_of(data, size, text_end);
    } else if (size <= 16) {
        unit.first = eight(data);
        unit.second = word_of(data + 8, size - 8, text_end);
    } else {
        unit.first = sip_hash(self->secrets + 2, data, size);
    }
    return unit;
}

static bool is_same(Unit one, Unit other) {
    return one.first == other.first && one.second == other.second && one.size == other.size;
}

static Known *place_of(const Memory *self, Unit unit) {
    return self->known[(unit.first * self->secrets[0] + unit.second * self->secrets[1]) >> (64 - PLACE_BITS)];
}

static inline const Known *find(const Memory *self, Unit unit) {
    Known *place = place_of(self, unit);
    if (is_same(place[0].unit, unit))
        return place;
    if (!is_same(place[1].unit, unit))
        return NULL;
    Known found = place[1];
    place[1] = place[0];
    place[0] = found;
    return place;
}

static const Known *make(Memory *self, Unit unit, PyObject *digest, const uint8_t *data, size_t size) {
    PyObject *made = PyObject_CallFunction(digest, "y#", (const char *)data, (Py_ssize_t)size);
    unsigned long hash = made ? PyLong_AsUnsignedLong(made) : 0;
    Py_XDECREF(made);
    if (hash >> HASH_BITS && !PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "expected a hash of %d bits", HASH_BITS);
    if (PyErr_Occurred())
        return NULL;
    static const char signs[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    Known *place = place_of(self, unit);
    place[1] = place[0];
    place[0].unit = unit;
    for (int at = 0; at < SIGNS; at++)
        place[0].packed[at] = signs[hash >> (HASH_BITS - 6 * (at + 1)) & 63];
    return place;
}

/* Hash the units of a text; without `digest` up to the first that is not known, and without need of the interpreter. */
static int hash_units(Memory *self, Text *text, PyObject *digest) {
    while (text->at < text->size) {
        const uint8_t *data = text->data + text->at;
        size_t end = unit_end(self->kinds, text->data, text->at, text->size), size = end - text->at;
        Unit unit = unit_of(self, data, size, text->data + text->size);
        const Known *known = find(self, unit);
        if (!known && digest)
            known = make(self, unit, digest, data, size);
        if (!known)
            return -1;
        memcpy(text->packed[text->units++], known->packed, SIGNS);
        text->at = end;
    }
    return 0;
}

static PyObject *packed(Memory *self, Text *texts, Py_ssize_t count, PyObject *digest) {
    size_t size = 0;
    for (Py_ssize_t at = 0; at < count; at++)
        size += texts[at].size;
    if (size > SHORT) { /* less takes no longer than it takes to give the interpreter away and to get it back */
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < count; at++)
            hash_units(self, &texts[at], NULL);
        Py_END_ALLOW_THREADS
    }
    PyObject *told = PyList_New(count);
    for (Py_ssize_t at = 0; told && at < count; at++) {
        Text *text = &texts[at];
        PyObject *one = NULL;
        if (hash_units(self, text, digest) == 0)
            one = PyUnicode_DecodeASCII(*text->packed, (Py_ssize_t)(SIGNS * text->units), NULL);
        if (one)
            PyList_SET_ITEM(told, at, one);
        else
            Py_CLEAR(told);
    }
    return told;
}

static int encode(Text *text, PyObject *given) {
    if (PyUnicode_GetLength(given) < 0)
        return -1;
    bool is_ascii = PyUnicode_IS_ASCII(given);
    text->owner = is_ascii ? Py_NewRef(given) : PyUnicode_AsEncodedString(given, "utf-8", "surrogatepass");
    if (!text->owner)
        return -1;
    text->data = is_ascii ? PyUnicode_DATA(given) : (const uint8_t *)PyBytes_AS_STRING(text->owner);
    text->size = (size_t)(is_ascii ? PyUnicode_GET_LENGTH(given) : PyBytes_GET_SIZE(text->owner));
    /* As many units as bytes at most. What is not touched of it takes no memory. */
    text->packed = PyMem_New(Packed, text->size);
    return text->packed ? 0 : (PyErr_NoMemory(), -1);
}

static PyObject *pack(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Memory *self = (Memory *)object;
    if (given != 2 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of texts and what hashes a unit");
        return NULL;
    }
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "a memory serves one call at a time");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(args[0]), encoded = 0;
    Text *texts = PyMem_Calloc((size_t)count, sizeof *texts);
    if (!texts)
        return PyErr_NoMemory();
    self->is_busy = true;
    while (encoded < count && encode(&texts[encoded], PyTuple_GET_ITEM(args[0], encoded)) == 0)
        encoded++;
    PyObject *told = encoded == count ? packed(self, texts, count, args[1]) : NULL;
    self->is_busy = false;
    for (Py_ssize_t at = 0; at < count; at++) {
        Py_XDECREF(texts[at].owner);
        PyMem_Free(texts[at].packed);
    }
    PyMem_Free(texts);
    return told;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"kinds", "secret", NULL};
    const char *kinds, *secret;
    Py_ssize_t kinds_size, secret_size;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#y#", names, &kinds, &kinds_size, &secret, &secret_size))
        return NULL;
    if (kinds_size != BYTES || secret_size != SECRETS * 8) {
        PyErr_Format(PyExc_ValueError, "expected the kinds of %d bytes and a secret of %d", BYTES, SECRETS * 8);
        return NULL;
    }
    Memory *self = (Memory *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    memcpy(self->secrets, secret, sizeof self->secrets);
    self->secrets[0] |= 1;
    self->secrets[1] |= 1;
    for (int byte = 0; byte < BYTES; byte++)
        self->kinds[byte] = (uint8_t)(1 << ((uint8_t)kinds[byte] >> 1 & 7));
    self->known = PyMem_RawCalloc((size_t)1 << PLACE_BITS, sizeof *self->known);
    if (!self->known) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyMem_RawFree(((Memory *)object)->known);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, "Return the hashes of texts, each text's in base64."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, (void *)new}, {Py_tp_dealloc, (void *)dealloc}, {Py_tp_methods, methods}, {0, NULL},
};

static PyType_Spec type_of_memory = {
    "gateway.recorder._units.Memory", sizeof(Memory), 0, Py_TPFLAGS_DEFAULT, type_slots,
};

static int add_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&type_of_memory);
    int status = type ? PyModule_AddObjectRef(module, "Memory", type) : -1;
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_type}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "gateway.recorder._units", .m_slots = slots,
};

PyMODINIT_FUNC PyInit__units(void) { return PyModuleDef_Init(&definition); }
