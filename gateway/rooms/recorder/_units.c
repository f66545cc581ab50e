/* Does in one pass what units.py and hashes.py do with numpy: splits texts into units, looks up the hashes of known units
   and packs the hashes in base64.

   It is built only with the compiled gateway and for little-endian processors (scripts/build_extensions.py); otherwise
   the Python modules are used. Tests compare both. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { TABLE_BITS = 16, HASH_BITS = 24, CHARACTERS = HASH_BITS / 6, BYTES = 256, SECRETS = 4, SHORT = 1 << 14 };

/* The classes of bytes of units.py, one bit each; its two kinds of blanks are one here. */
enum { BLANK = 1 << 0, LETTER = 1 << 1, DIGIT = 1 << 2, ALONE = 1 << 5, CONTINUED = 1 << 6 };

/* A unit, identified by its bytes, or by a keyed hash of them if there are more than 16. */
typedef struct {
    uint64_t first, second;
    uint32_t size;
} Unit;

typedef char Packed[CHARACTERS]; /* a hash in base64 */

typedef struct {
    Unit unit;
    Packed packed;
} Entry;

typedef struct {
    PyObject_HEAD
    Entry (*slots)[2]; /* each slot holds the two most recent of its units */
    uint64_t secrets[SECRETS]; /* two odd factors for slots, and the key of the hash; both unpredictable */
    uint8_t kinds[BYTES];
    bool is_busy;
} HashCache;

typedef struct {
    PyObject *owner;
    const uint8_t *data;
    Packed *packed;
    size_t size, at, units; /* `units` hashes are done; the next unit begins at `at` */
} Text;

static uint64_t eight(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* The number of leading ASCII letters and `_` among eight bytes. */
static size_t letters(uint64_t word) {
    const uint64_t each = 0x0101010101010101u, high = 0x80 * each;
    uint64_t lower = (word & ~high) | 0x20 * each;
    uint64_t is_letter = (lower + (0x80 - 'a') * each) & ~(lower + (0x80 - 'z' - 1) * each);
    uint64_t is_no_underscore = ((word & ~high) ^ '_' * each) + 0x7F * each;
    uint64_t others = (~(is_letter | ~is_no_underscore) | word) & high;
    return others ? (size_t)__builtin_ctzll(others) / 8 : 8;
}

/* The end of the unit that begins at `at`. (Inlining the functions called for each unit saves a quarter of the time.) */
static inline size_t unit_end(const uint8_t *kinds, const uint8_t *data, size_t at, size_t size) {
    if (data[at] == ' ' && at + 1 < size && kinds[data[at + 1]] != BLANK)
        at++; /* a single blank belongs to the unit after it */
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

/* Up to eight bytes as a word. Bytes beyond them are read if the text has them, and masked out. */
static uint64_t word_of(const uint8_t *data, size_t size, const uint8_t *text_end) {
    if (text_end - data >= 8)
        return eight(data) & (UINT64_MAX >> (64 - 8 * size));
    uint64_t word = 0;
    memcpy(&word, data, size);
    return word;
}

static uint64_t rotated(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

static void sip_round(uint64_t v[4]) {
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotated(v[1], 13) ^ v[0];
    v[3] = rotated(v[3], 16) ^ v[2];
    v[0] = rotated(v[0], 32) + v[3];
    v[2] += v[1];
    v[1] = rotated(v[1], 17) ^ v[2];
    v[3] = rotated(v[3], 21) ^ v[0];
    v[2] = rotated(v[2], 32);
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

static inline Unit unit_of(const HashCache *self, const uint8_t *data, size_t size, const uint8_t *text_end) {
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

static Entry *slot_of(const HashCache *self, Unit unit) {
    return self->slots[(unit.first * self->secrets[0] + unit.second * self->secrets[1]) >> (64 - TABLE_BITS)];
}

static inline const Entry *find(const HashCache *self, Unit unit) {
    Entry *slot = slot_of(self, unit);
    if (is_same(slot[0].unit, unit))
        return slot;
    if (!is_same(slot[1].unit, unit))
        return NULL;
    Entry entry = slot[1];
    slot[1] = slot[0];
    slot[0] = entry;
    return slot;
}

static const Entry *add(HashCache *self, Unit unit, PyObject *digest, const uint8_t *data, size_t size) {
    PyObject *result = PyObject_CallFunction(digest, "y#", (const char *)data, (Py_ssize_t)size);
    unsigned long hash = result ? PyLong_AsUnsignedLong(result) : 0;
    Py_XDECREF(result);
    if (hash >> HASH_BITS && !PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "expected a hash of %d bits", HASH_BITS);
    if (PyErr_Occurred())
        return NULL;
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    Entry *slot = slot_of(self, unit);
    slot[1] = slot[0];
    slot[0].unit = unit;
    for (int at = 0; at < CHARACTERS; at++)
        slot[0].packed[at] = alphabet[hash >> (HASH_BITS - 6 * (at + 1)) & 63];
    return slot;
}

/* Hash the units of a text. Without `digest`, stop at the first unknown unit; this does not need the interpreter. */
static int hash_units(HashCache *self, Text *text, PyObject *digest) {
    while (text->at < text->size) {
        const uint8_t *data = text->data + text->at;
        size_t end = unit_end(self->kinds, text->data, text->at, text->size), size = end - text->at;
        Unit unit = unit_of(self, data, size, text->data + text->size);
        const Entry *entry = find(self, unit);
        if (!entry && digest)
            entry = add(self, unit, digest, data, size);
        if (!entry)
            return -1;
        memcpy(text->packed[text->units++], entry->packed, CHARACTERS);
        text->at = end;
    }
    return 0;
}

static PyObject *packed(HashCache *self, Text *texts, Py_ssize_t count, PyObject *digest) {
    size_t size = 0;
    for (Py_ssize_t at = 0; at < count; at++)
        size += texts[at].size;
    if (size > SHORT) { /* for less, releasing the interpreter takes longer than hashing */
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < count; at++)
            hash_units(self, &texts[at], NULL);
        Py_END_ALLOW_THREADS
    }
    PyObject *results = PyList_New(count);
    for (Py_ssize_t at = 0; results && at < count; at++) {
        Text *text = &texts[at];
        PyObject *result = NULL;
        if (hash_units(self, text, digest) == 0)
            result = PyUnicode_DecodeASCII(*text->packed, (Py_ssize_t)(CHARACTERS * text->units), NULL);
        if (result)
            PyList_SET_ITEM(results, at, result);
        else
            Py_CLEAR(results);
    }
    return results;
}

static int encode(Text *text, PyObject *string) {
    if (PyUnicode_GetLength(string) < 0)
        return -1;
    bool is_ascii = PyUnicode_IS_ASCII(string);
    text->owner = is_ascii ? Py_NewRef(string) : PyUnicode_AsEncodedString(string, "utf-8", "surrogatepass");
    if (!text->owner)
        return -1;
    text->data = is_ascii ? PyUnicode_DATA(string) : (const uint8_t *)PyBytes_AS_STRING(text->owner);
    text->size = (size_t)(is_ascii ? PyUnicode_GET_LENGTH(string) : PyBytes_GET_SIZE(text->owner));
    /* There are at most as many units as bytes. Untouched pages take no memory. */
    text->packed = PyMem_New(Packed, text->size);
    return text->packed ? 0 : (PyErr_NoMemory(), -1);
}

static PyObject *pack(PyObject *object, PyObject *const *args, Py_ssize_t arg_count) {
    HashCache *self = (HashCache *)object;
    if (arg_count != 2 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of texts and a function that hashes a unit");
        return NULL;
    }
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another call has not ended");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(args[0]), encoded = 0;
    Text *texts = PyMem_Calloc((size_t)count, sizeof *texts);
    if (!texts)
        return PyErr_NoMemory();
    self->is_busy = true;
    while (encoded < count && encode(&texts[encoded], PyTuple_GET_ITEM(args[0], encoded)) == 0)
        encoded++;
    PyObject *results = encoded == count ? packed(self, texts, count, args[1]) : NULL;
    self->is_busy = false;
    for (Py_ssize_t at = 0; at < count; at++) {
        Py_XDECREF(texts[at].owner);
        PyMem_Free(texts[at].packed);
    }
    PyMem_Free(texts);
    return results;
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
    HashCache *self = (HashCache *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    memcpy(self->secrets, secret, sizeof self->secrets);
    self->secrets[0] |= 1;
    self->secrets[1] |= 1;
    for (int byte = 0; byte < BYTES; byte++)
        self->kinds[byte] = (uint8_t)(1 << ((uint8_t)kinds[byte] >> 1 & 7));
    self->slots = PyMem_RawCalloc((size_t)1 << TABLE_BITS, sizeof *self->slots);
    if (!self->slots) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyMem_RawFree(((HashCache *)object)->slots);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, "Return the hashes of each text in base64."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, (void *)new}, {Py_tp_dealloc, (void *)dealloc}, {Py_tp_methods, methods}, {0, NULL},
};

static PyType_Spec hash_cache_spec = {
    "gateway.rooms.recorder._units.HashCache", sizeof(HashCache), 0, Py_TPFLAGS_DEFAULT, type_slots,
};

static int add_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&hash_cache_spec);
    int status = type ? PyModule_AddObjectRef(module, "HashCache", type) : -1;
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_type}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "gateway.rooms.recorder._units", .m_slots = slots,
};

PyMODINIT_FUNC PyInit__units(void) { return PyModuleDef_Init(&definition); }
