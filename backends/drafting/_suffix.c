/* The computations of suffix_trees.py, in a thirtieth of the time.

   Part of a compiled build (scripts/build_extensions.py); without it, suffix_trees.py computes the same in Python and
   explains the rules. tests/extensions/test_suffix.py checks that both agree. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = -1, END = -1 /* after each sequence in the buffer; no token has this id */, LEAF = -1, FREE = -2 };

/* A child of a node: another node (a run of tokens seen more than once), or a leaf, which is only the index in the
   buffer where it continues, so that leaves grow with their sequence at no cost. */
typedef struct {
    int32_t previous, following; /* siblings */
    int32_t token, count;        /* first token of its run */
    int32_t slot;                /* of a node; or LEAF or FREE */
    int32_t at;                  /* index in the buffer of a leaf, length of the label of a node */
} Cell;

/* The rest of a node. The label starts at label[skipped]. */
typedef struct {
    int32_t first, last; /* children, by falling count */
    int32_t once;        /* first child with a count of 1 */
    int32_t skipped;
    int32_t label[];
} Slot;

/* From a node's slot and the first token of a child to the child. Free entries have cell 0, which is the root. The
   child of a node with one child, as most have, is not in the table. */
typedef struct {
    int32_t slot, token, cell;
} Entry;

typedef struct {
    int32_t depth;
    Cell *cells;
    char *slots;
    Entry *entries;
    int32_t *buffer;       /* tokens of all sequences */
    int32_t *active;       /* [m - 1] is the node of the last m tokens of the newest sequence, if they occurred */
    size_t slot_bytes;
    int32_t cells_used, cells_held, free_cell;
    int32_t slots_used, slots_held, free_slot;
    int32_t entries_used, entries_held; /* held: a power of two */
    int32_t oldest, tokens, tokens_held; /* start and end of the used part of the buffer */
    int32_t length;                      /* of the newest sequence */
    int32_t matches;                     /* of `active` */
} Tree;

static inline Slot *slot_of(const Tree *tree, int32_t slot) {
    return (Slot *)(tree->slots + (size_t)slot * tree->slot_bytes);
}

static inline int32_t least(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* The table: open addressing; removing an entry moves up the entries after it. */

static inline int32_t home(const Tree *tree, int32_t slot, int32_t token) {
    uint32_t mixed = ((uint32_t)slot + 1) * 0x9E3779B1u + (uint32_t)token * 0x85EBCA6Bu;
    return (int32_t)((mixed ^ (mixed >> 15)) & (uint32_t)(tree->entries_held - 1));
}

/* Return the index of an entry, or of the free one where it would be. */
static int32_t look_up(const Tree *tree, int32_t slot, int32_t token) {
    int32_t index = home(tree, slot, token);
    while (tree->entries[index].cell && (tree->entries[index].slot != slot || tree->entries[index].token != token))
        index = (index + 1) & (tree->entries_held - 1);
    return index;
}

static int32_t find(const Tree *tree, int32_t slot, int32_t token) {
    const Slot *node = slot_of(tree, slot);
    if (node->first == NONE || tree->cells[node->first].token == token)
        return node->first;
    if (node->first == node->last)
        return NONE;
    int32_t cell = tree->entries[look_up(tree, slot, token)].cell;
    return cell ? cell : NONE;
}

/* Add a child, or replace the one with the same first token. */
static void enter(Tree *tree, int32_t slot, int32_t cell) {
    int32_t token = tree->cells[cell].token;
    Entry *entry = &tree->entries[look_up(tree, slot, token)];
    tree->entries_used += !entry->cell;
    *entry = (Entry){slot, token, cell};
}

static void leave(Tree *tree, int32_t slot, int32_t cell) {
    Entry *entries = tree->entries;
    int32_t mask = tree->entries_held - 1, hole = look_up(tree, slot, tree->cells[cell].token);
    tree->entries_used--;
    for (int32_t index = (hole + 1) & mask; entries[index].cell; index = (index + 1) & mask) {
        /* An entry moves into the hole unless its home lies behind the hole. */
        int32_t from = home(tree, entries[index].slot, entries[index].token);
        if (((index - from) & mask) >= ((index - hole) & mask)) {
            entries[hole] = entries[index];
            hole = index;
        }
    }
    entries[hole].cell = 0;
}

/* Memory. */

static bool grow(void **memory, int32_t *held, size_t needed, size_t bytes) {
    size_t size = *held ? (size_t)*held : 64;
    while (size < needed)
        size *= 2;
    void *larger = size > INT32_MAX ? NULL : realloc(*memory, size * bytes);
    if (!larger)
        return false;
    *memory = larger;
    *held = (int32_t)size;
    return true;
}

static bool grow_entries(Tree *tree, size_t needed) {
    Entry *old = tree->entries;
    int32_t old_held = tree->entries_held;
    size_t size = old_held ? (size_t)old_held : 64;
    while (size < needed)
        size *= 2;
    Entry *larger = size > INT32_MAX ? NULL : calloc(size, sizeof(Entry));
    if (!larger)
        return false;
    tree->entries = larger;
    tree->entries_held = (int32_t)size;
    for (int32_t index = 0; index < old_held; index++)
        if (old[index].cell)
            larger[look_up(tree, old[index].slot, old[index].token)] = old[index];
    free(old);
    return true;
}

/* Move the used part of the buffer to its start. */
static void rebase(Tree *tree) {
    int32_t shift = tree->oldest;
    memmove(tree->buffer, tree->buffer + shift, (size_t)(tree->tokens - shift) * sizeof(int32_t));
    tree->tokens -= shift;
    tree->oldest = 0;
    for (int32_t cell = 0; cell < tree->cells_used; cell++)
        if (tree->cells[cell].slot == LEAF)
            tree->cells[cell].at -= shift;
}

/* Make room to append any token. Only this moves memory. */
static bool reserve(Tree *tree) {
    size_t steps = (size_t)tree->depth;
    if (tree->tokens + 2 > tree->tokens_held && 2 * (int64_t)tree->oldest > tree->tokens_held)
        rebase(tree);
    size_t cells = (size_t)tree->cells_used + 2 * steps, slots = (size_t)tree->slots_used + steps;
    size_t entries = 2 * ((size_t)tree->entries_used + 2 * steps), tokens = (size_t)tree->tokens + 2;
    return (cells <= (size_t)tree->cells_held || grow((void **)&tree->cells, &tree->cells_held, cells, sizeof(Cell))) &&
           (slots <= (size_t)tree->slots_held ||
            grow((void **)&tree->slots, &tree->slots_held, slots, tree->slot_bytes)) &&
           (tokens <= (size_t)tree->tokens_held ||
            grow((void **)&tree->buffer, &tree->tokens_held, tokens, sizeof(int32_t))) &&
           (entries <= (size_t)tree->entries_held || grow_entries(tree, entries));
}

static void tree_free(Tree *tree) {
    free(tree->cells);
    free(tree->slots);
    free(tree->entries);
    free(tree->buffer);
    free(tree->active);
}

static int32_t new_cell(Tree *tree, int32_t token, int32_t count, int32_t slot, int32_t at) {
    int32_t cell = tree->free_cell;
    if (cell == NONE)
        cell = tree->cells_used++;
    else
        tree->free_cell = tree->cells[cell].following;
    tree->cells[cell] = (Cell){NONE, NONE, token, count, slot, at};
    return cell;
}

static void free_cell(Tree *tree, int32_t cell) {
    tree->cells[cell].slot = FREE;
    tree->cells[cell].following = tree->free_cell;
    tree->free_cell = cell;
}

/* Return the slot of a node without children and with the label `token`. */
static int32_t new_slot(Tree *tree, int32_t token) {
    int32_t slot = tree->free_slot;
    if (slot == NONE)
        slot = tree->slots_used++;
    else
        tree->free_slot = slot_of(tree, slot)->first;
    Slot *node = slot_of(tree, slot);
    node->first = node->last = node->once = NONE;
    node->skipped = 0;
    node->label[0] = token;
    return slot;
}

static void free_slot(Tree *tree, int32_t slot) {
    slot_of(tree, slot)->first = tree->free_slot;
    tree->free_slot = slot;
}

static bool tree_init(Tree *tree, int32_t depth) {
    *tree = (Tree){.depth = depth, .free_cell = NONE, .free_slot = NONE};
    tree->slot_bytes = sizeof(Slot) + (size_t)depth * sizeof(int32_t);
    tree->active = malloc((size_t)depth * sizeof(int32_t));
    if (!tree->active || !reserve(tree)) {
        tree_free(tree);
        *tree = (Tree){0};
        return false;
    }
    new_cell(tree, END, 0, new_slot(tree, END), 0); /* the root */
    return true;
}

/* Lists of children. */

static void set_only_child(Tree *tree, int32_t slot, int32_t cell) {
    Slot *node = slot_of(tree, slot);
    tree->cells[cell].previous = tree->cells[cell].following = NONE;
    node->first = node->last = cell;
    node->once = tree->cells[cell].count == 1 ? cell : NONE;
}

static void unlink_child(Tree *tree, Slot *node, int32_t cell) {
    int32_t before = tree->cells[cell].previous, after = tree->cells[cell].following;
    *(before == NONE ? &node->first : &tree->cells[before].following) = after;
    *(after == NONE ? &node->last : &tree->cells[after].previous) = before;
    if (node->once == cell)
        node->once = after;
}

/* Insert a cell after the cell `before`; NONE for the start of the list. */
static void link_after(Tree *tree, Slot *node, int32_t before, int32_t cell) {
    int32_t *next = before == NONE ? &node->first : &tree->cells[before].following, after = *next;
    tree->cells[cell].previous = before;
    tree->cells[cell].following = after;
    *next = cell;
    *(after == NONE ? &node->last : &tree->cells[after].previous) = cell;
}

/* Append a child with a count of 1. */
static void add_child(Tree *tree, int32_t slot, int32_t cell) {
    Slot *node = slot_of(tree, slot);
    if (node->first != NONE) {
        if (node->first == node->last)
            enter(tree, slot, node->first);
        enter(tree, slot, cell);
    }
    link_after(tree, node, node->last, cell);
    if (node->once == NONE)
        node->once = cell;
}

static void drop_child(Tree *tree, int32_t slot, int32_t cell) {
    Slot *node = slot_of(tree, slot);
    bool listed = node->first != node->last;
    if (listed)
        leave(tree, slot, cell);
    unlink_child(tree, node, cell);
    if (listed && node->first == node->last)
        leave(tree, slot, node->first);
}

/* Put `new`, which has the same first token, in the position of `old`. */
static void replace_child(Tree *tree, int32_t slot, int32_t old, int32_t new) {
    Slot *node = slot_of(tree, slot);
    if (node->first != node->last)
        enter(tree, slot, new);
    int32_t once = node->once, before = tree->cells[old].previous;
    unlink_child(tree, node, old);
    link_after(tree, node, before, new);
    if (once == old)
        node->once = new;
}

/* Move a child whose count is about to rise by 1. */
static void rank_rise(Tree *tree, Slot *node, int32_t cell) {
    const Cell *cells = tree->cells;
    int32_t count = cells[cell].count, before = cells[cell].previous;
    if (node->once == cell)
        node->once = cells[cell].following;
    if (before == NONE || cells[before].count > count + 1)
        return;
    int32_t above = cells[before].count;
    if (above == 1)
        before = cells[node->once].previous;
    else
        while (before != NONE && cells[before].count == above)
            before = cells[before].previous;
    unlink_child(tree, node, cell);
    link_after(tree, node, before, cell);
}

/* Move a child whose count is about to fall by 1, to 1 or more. */
static void rank_fall(Tree *tree, Slot *node, int32_t cell) {
    const Cell *cells = tree->cells;
    int32_t count = cells[cell].count, last = cell;
    while (cells[last].following != NONE && cells[cells[last].following].count == count)
        last = cells[last].following;
    if (last != cell) {
        unlink_child(tree, node, cell);
        link_after(tree, node, last, cell);
    }
    if (count == 2)
        node->once = cell;
}

/* Appending tokens. */

static void begin(Tree *tree) {
    if (tree->tokens > tree->oldest && tree->buffer[tree->tokens - 1] != END)
        tree->buffer[tree->tokens++] = END;
    tree->length = tree->matches = 0;
}

static void grow_label(Tree *tree, Cell *node, int32_t token) {
    Slot *slot = slot_of(tree, node->slot);
    slot->label[slot->skipped + node->at++] = token;
}

/* Merge a node with its only child, whose label it already includes. */
static void absorb(Tree *tree, Cell *node, int32_t child) {
    const Slot *old = slot_of(tree, node->slot);
    Slot *slot = slot_of(tree, tree->cells[child].slot);
    memcpy(slot->label, old->label + old->skipped, (size_t)node->at * sizeof(int32_t));
    slot->skipped = 0;
    free_slot(tree, node->slot);
    node->slot = tree->cells[child].slot;
    free_cell(tree, child);
}

/* Remove the first token from the label of an only child. */
static void shorten(Tree *tree, Cell *child) {
    Slot *slot = slot_of(tree, child->slot);
    child->at--;
    child->token = slot->label[++slot->skipped];
}

/* Return the node that follows `above`, `length` tokens deep, after `token` at a leaf, whose count rises to 2. */
static int32_t step_into_leaf(Tree *tree, int32_t above, int32_t leaf, int32_t token, int32_t length) {
    Cell *node = &tree->cells[above], *child = &tree->cells[leaf];
    Slot *slot = slot_of(tree, node->slot);
    int32_t onward = child->at + 1;
    bool ends = length + 1 >= tree->depth || onward >= tree->tokens || tree->buffer[onward] == END;
    if (length > 0 && node->count == 2) {
        grow_label(tree, node, token);
        if (ends) {
            unlink_child(tree, slot, leaf);
            free_cell(tree, leaf);
        } else {
            child->token = tree->buffer[onward];
            child->at = onward;
        }
        return above;
    }
    if (length > 0)
        rank_rise(tree, slot, leaf);
    child->count = 2;
    child->slot = new_slot(tree, token);
    child->at = 1;
    if (!ends)
        set_only_child(tree, child->slot, new_cell(tree, tree->buffer[onward], 1, LEAF, onward));
    return leaf;
}

/* Return the node that follows `above`, `length` tokens deep, after `token`; NONE if this run is new. */
static int32_t step(Tree *tree, int32_t above, int32_t token, int32_t length) {
    Cell *node = &tree->cells[above];
    int32_t child = find(tree, node->slot, token);
    if (child == NONE) {
        add_child(tree, node->slot, new_cell(tree, token, 1, LEAF, tree->tokens - 1));
        return NONE;
    }
    Cell *cell = &tree->cells[child];
    if (cell->slot == LEAF)
        return step_into_leaf(tree, above, child, token, length);
    if (length > 0 && node->count == cell->count + 1) {
        grow_label(tree, node, token);
        if (cell->at == 1)
            absorb(tree, node, child);
        else
            shorten(tree, cell);
        return above;
    }
    if (length > 0)
        rank_rise(tree, slot_of(tree, node->slot), child);
    if (cell->at > 1) {
        int32_t upper = new_cell(tree, token, cell->count, new_slot(tree, token), 1);
        replace_child(tree, node->slot, child, upper);
        shorten(tree, cell);
        set_only_child(tree, tree->cells[upper].slot, child);
        child = upper;
    }
    tree->cells[child].count++;
    return child;
}

/* Append a token to the newest sequence; the tree must have room. */
static void append(Tree *tree, int32_t token) {
    tree->buffer[tree->tokens++] = token;
    tree->length++;
    int32_t matches = 0;
    for (int32_t length = least(tree->matches, tree->depth - 1); length >= 0; length--) {
        int32_t node = step(tree, length ? tree->active[length - 1] : 0, token, length);
        if (node == NONE)
            continue;
        tree->active[length] = node;
        if (!matches)
            matches = length + 1;
    }
    tree->matches = matches;
}

/* Subtract the counts of the sequence from `first` to `end` of the buffer. */
static void subtract(Tree *tree, int32_t first, int32_t end) {
    for (int32_t start = first; start < end; start++) {
        int32_t above = 0;
        for (int32_t at = start; at < end && at - start < tree->depth;) {
            int32_t slot = tree->cells[above].slot, child = find(tree, slot, tree->buffer[at]);
            if (tree->cells[child].count == 1) {
                drop_child(tree, slot, child);
                while (child != NONE) { /* what is below has at most one child */
                    int32_t inner = tree->cells[child].slot, below = inner == LEAF ? NONE : slot_of(tree, inner)->first;
                    if (inner != LEAF)
                        free_slot(tree, inner);
                    free_cell(tree, child);
                    child = below;
                }
                break;
            }
            if (above)
                rank_fall(tree, slot_of(tree, slot), child);
            tree->cells[child].count--;
            at += tree->cells[child].at;
            above = child;
        }
    }
}

/* Remove the oldest sequence, before a new one begins. */
static void forget_oldest(Tree *tree) {
    int32_t end = tree->oldest;
    while (end < tree->tokens && tree->buffer[end] != END)
        end++;
    subtract(tree, tree->oldest, end);
    tree->oldest = least(end + 1, tree->tokens);
    tree->matches = 0;
}

static void forget_newest(Tree *tree) {
    int32_t first = tree->tokens - tree->length;
    subtract(tree, first, tree->tokens);
    tree->tokens = first;
    tree->length = tree->matches = 0;
}

/* Drafting. */

typedef struct {
    int32_t cell, offset; /* where a match ends: an offset in the run of a cell */
} Place;

typedef struct {
    PyObject_HEAD
    Tree tree; /* of the answers of earlier requests */
    int32_t depth, cached, max_cached;
    int64_t max_model_len;
    float min_prob;
    int32_t *limits; /* [m] is the maximum number of tokens of a draft for a match of m tokens */
    Place *places;
    int32_t *draft, *other;
    bool busy;
} Trees;

/* Return the tokens of a cell from an offset, at most `limit`, and store their number. */
static const int32_t *run_of(const Tree *tree, int32_t cell, int32_t offset, int32_t limit, int32_t *tokens) {
    const Cell *held = &tree->cells[cell];
    if (held->slot != LEAF) {
        const Slot *slot = slot_of(tree, held->slot);
        *tokens = least(limit, held->at - offset);
        return slot->label + slot->skipped + offset;
    }
    const int32_t *run = tree->buffer + held->at + offset;
    int32_t length = 0;
    limit = least(limit, tree->tokens - held->at - offset);
    while (length < limit && run[length] != END)
        length++;
    *tokens = length;
    return run;
}

/* Write the most frequent continuation of a place to `draft`, and return its score and number of tokens. */
static float follow(const Tree *tree, Place place, int32_t limit, float min_prob, int32_t *draft, int32_t *tokens) {
    int32_t cell = place.cell, more, drafted = 0;
    const int32_t *run = run_of(tree, cell, place.offset, limit, &more);
    float score = 0, prob = 1;
    for (;;) {
        memcpy(draft + drafted, run, (size_t)more * sizeof(int32_t));
        drafted += more;
        for (; more > 0; more--)
            score += prob;
        int32_t slot = tree->cells[cell].slot, child = slot == LEAF ? NONE : slot_of(tree, slot)->first;
        if (drafted >= limit || child == NONE)
            break;
        prob *= (float)tree->cells[child].count / (float)tree->cells[cell].count;
        if (prob < min_prob)
            break;
        cell = child;
        run = run_of(tree, cell, 0, limit - drafted, &more);
    }
    *tokens = drafted;
    return score;
}

/* Return whether a tree contains a run, and store where it ends. */
static bool locate(const Tree *tree, const int32_t *run, int32_t length, Place *place) {
    *place = (Place){0, 0};
    for (int32_t at = 0; at < length; at += place->offset) {
        int32_t slot = tree->cells[place->cell].slot, child = slot == LEAF ? NONE : find(tree, slot, run[at]), held;
        if (child == NONE)
            return false;
        const int32_t *theirs = run_of(tree, child, 0, length - at, &held);
        if (memcmp(theirs, run + at, (size_t)held * sizeof(int32_t)) != 0)
            return false;
        *place = (Place){child, held};
    }
    return true;
}

/* Write the best draft after `known` tokens of a text to `trees->draft` if its score is higher than `score`. Return
   the score of the better one, and store its number of tokens. */
static float best_draft(Trees *trees, const Tree *tree, const int32_t *text, int32_t known, int32_t longest,
                        int64_t room, float score, int32_t *tokens) {
    int32_t matches = least(tree->matches, longest);
    for (int32_t index = 0; index < matches; index++)
        trees->places[index] = (Place){tree->active[index], tree->cells[tree->active[index]].at};
    if (matches == tree->length) /* the match may start before the answer: only those of earlier answers do */
        while (matches < longest && locate(tree, text + known - matches - 1, matches + 1, &trees->places[matches]))
            matches++;
    for (int32_t length = matches; length > 0; length--) {
        int64_t limit = trees->limits[length] < room ? trees->limits[length] : room;
        if ((float)limit <= score) /* a score is at most the number of tokens, and the longest match wins ties */
            continue;
        int32_t drafted;
        float found = follow(tree, trees->places[length - 1], (int32_t)limit, trees->min_prob, trees->other, &drafted);
        if (found > score) {
            int32_t *draft = trees->other;
            trees->other = trees->draft;
            trees->draft = draft;
            score = found;
            *tokens = drafted;
        }
    }
    return score;
}

static bool replay_on(Trees *trees, Tree *local, const int32_t *text, int32_t total, int32_t prompt, int32_t *emitted,
                      int32_t *drafted) {
    Tree *shared = &trees->tree;
    for (int32_t at = 0; at < total; at++) {
        if (!reserve(local) || !reserve(shared))
            return false;
        int32_t position = at - prompt, known = at + 1, tokens = 0, agreed = 0;
        if (trees->max_cached > 0 && position >= 0)
            append(shared, text[at]);
        if (known == total)
            break;
        append(local, text[at]);
        if (position < 0)
            continue;
        int32_t longest = least(trees->depth, known) - 1;
        int64_t room = trees->max_model_len - known - 1;
        float score = best_draft(trees, local, text, known, longest, room, 0, &tokens);
        best_draft(trees, shared, text, known, longest, room, score, &tokens);
        while (agreed < least(tokens, total - known - 1) && trees->draft[agreed] == text[known + agreed])
            agreed++;
        emitted[position + 1] = 1 + agreed;
        drafted[position + 1] = tokens;
    }
    return true;
}

static bool replay_text(Trees *trees, const int32_t *text, int32_t total, int32_t prompt, bool learn, int32_t *emitted,
                        int32_t *drafted) {
    Tree local;
    if (!reserve(&trees->tree) || !tree_init(&local, trees->depth))
        return false;
    for (; learn && trees->cached && trees->cached >= trees->max_cached; trees->cached--)
        forget_oldest(&trees->tree);
    begin(&trees->tree);
    bool done = replay_on(trees, &local, text, total, prompt, emitted, drafted);
    if (done && learn && trees->max_cached > 0)
        trees->cached++;
    else
        forget_newest(&trees->tree);
    tree_free(&local);
    return done;
}

/* The Python type. */

static PyObject *trees_replay(Trees *self, PyObject *args) {
    Py_buffer text, emitted, drafted;
    Py_ssize_t prompt;
    int learn;
    if (!PyArg_ParseTuple(args, "y*npw*w*", &text, &prompt, &learn, &emitted, &drafted))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t bytes = sizeof(int32_t), total = text.len / bytes, answer_bytes = (total - prompt) * bytes;
    bool fits = prompt >= 0 && prompt <= total && total < INT32_MAX / 4 && emitted.len == answer_bytes;
    for (Py_ssize_t at = 0; fits && at < total; at++)
        fits = ((const int32_t *)text.buf)[at] >= 0;
    if (!fits || drafted.len != answer_bytes) {
        PyErr_SetString(PyExc_ValueError, "expected token ids of at least 0, and room for a step at each output token");
    } else if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread replays a text on these trees");
    } else {
        bool done;
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        done = replay_text(self, text.buf, (int32_t)total, (int32_t)prompt, learn, emitted.buf, drafted.buf);
        Py_END_ALLOW_THREADS
        self->busy = false;
        result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    PyBuffer_Release(&text);
    PyBuffer_Release(&emitted);
    PyBuffer_Release(&drafted);
    return result;
}

static PyObject *trees_held_bytes(Trees *self, void *closure) {
    (void)closure;
    const Tree *tree = &self->tree;
    return PyLong_FromSize_t((size_t)tree->cells_held * sizeof(Cell) + (size_t)tree->slots_held * tree->slot_bytes +
                             (size_t)tree->entries_held * sizeof(Entry) + (size_t)tree->tokens_held * sizeof(int32_t));
}

static void trees_dealloc(Trees *self) {
    tree_free(&self->tree);
    free(self->limits);
    free(self->places);
    free(self->draft);
    free(self->other);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *trees_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int depth, max_cached;
    Py_ssize_t max_tokens, max_model_len;
    double factor, min_prob;
    if (keywords && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "expected positional arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iddinn", &depth, &factor, &min_prob, &max_cached, &max_tokens, &max_model_len))
        return NULL;
    if (depth < 1 || !(factor >= 0)) {
        PyErr_SetString(PyExc_ValueError, "expected a depth of at least 1 and a factor of at least 0");
        return NULL;
    }
    Trees *self = (Trees *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    size_t bytes = (size_t)depth * sizeof(int32_t);
    self->depth = depth;
    self->max_cached = max_cached;
    self->max_model_len = max_model_len;
    self->min_prob = (float)min_prob;
    self->limits = malloc(bytes);
    self->places = malloc((size_t)depth * sizeof(Place));
    self->draft = malloc(bytes);
    self->other = malloc(bytes);
    if (!self->limits || !self->places || !self->draft || !self->other || !tree_init(&self->tree, depth)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int length = 0; length < depth; length++) {
        double tokens = (double)length * factor + 1e-6, limit = depth - length;
        limit = tokens < limit ? tokens : limit;
        self->limits[length] = (int32_t)((double)max_tokens < limit ? (double)max_tokens : limit);
    }
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"replay", (PyCFunction)trees_replay, METH_VARARGS,
     "replay($self, text, prompt_tokens, learn, emitted, drafted, /)\n--\n\nReplay a text; see suffix_trees.py."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"held_bytes", (getter)trees_held_bytes, NULL, "Allocated memory in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "backends.drafting._suffix.SuffixTrees",
    .tp_basicsize = sizeof(Trees),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A suffix tree of the answers of earlier requests; see suffix_trees.py.",
    .tp_new = trees_new,
    .tp_dealloc = (destructor)trees_dealloc,
    .tp_methods = methods,
    .tp_getset = properties,
};

static int add_types(PyObject *module) {
    return PyModule_AddType(module, &type);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "backends.drafting._suffix", .m_slots = slots,
};

PyMODINIT_FUNC PyInit__suffix(void) {
    return PyModuleDef_Init(&definition);
}
