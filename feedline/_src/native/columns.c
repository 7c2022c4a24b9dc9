/* The order and the gather of columns: computes which rows a batch contains, and copies them into the batch.
 *
 * C11 without the Python API: ctypes loads it, and releases the GIL during each call. The results are the same, bit
 * for bit, as those of feedline's NumPy code. The functions:
 *
 *   feedline_gather   copies rows of one leaf, from segments anywhere in memory, into a batch
 *   feedline_fill     finds the rows at some positions of an epoch (see order/permutation.py, epoch.py), and copies
 *                     these rows of several leaves into a batch
 *   feedline_permute  applies permutations of different sizes, each to one index
 *   feedline_spans    copies values of one leaf side by side into the rows of a batch
 *   feedline_mark     writes, for each value of such a row, the number of its span, and its offset in the span
 *   feedline_read     reads rows of an open file into a batch
 *
 * The functions allocate nothing and keep no state, so any number of threads may call them at a time. If a row is in
 * no segment, they return an error code, and read nothing. They return another code if a row is in a mapped file that
 * was truncated, or whose disk fails.
 */

#include "lost_memory.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#include <emmintrin.h>
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define X86 0
#define ALWAYS_INLINE inline
#endif

#define EXPORT __attribute__((visibility("default")))

/* Increased whenever a struct or a function changes; the binding refuses any other version. */
#define INTERFACE 6

enum { OK = 0, ROW_OUT_OF_RANGE = 1, POSITION_OUT_OF_RANGE = 2, BAD_ARGUMENT = 3, MEMORY_LOST = 4 };

EXPORT int32_t feedline_interface(void) { return INTERFACE; }

/* Install the signal handler, which prints the name of the mapped file that causes a SIGBUS. */
EXPORT void feedline_name_lost_files(void) { install_handler(); }

/* ---- order ---------------------------------------------------------------------------------------------------- */

#define ROUNDS 7
#define CHUNK 512 /* positions at a time, so few that their halves (see `cells`) stay in the first-level cache */

/* A Feistel network on a grid of `a` rows and 2^k columns: a permutation of [0, n). */
typedef struct {
  uint64_t n;
  uint64_t a; /* at most 2^31 */
  uint32_t k;
  uint32_t unused;
  uint64_t keys[ROUNDS];
} Network;

struct Mixed;

/* The order of one epoch. */
typedef struct {
  int32_t kind; /* 0: as stored, 1: shuffled, 2: blocks shuffled, then the rows in windows of blocks, 3: a mixture */
  int32_t unused;
  uint64_t n;           /* rows of the epoch */
  const int64_t *table; /* kind 1: the permutation itself if n is small; else NULL */
  Network rows;         /* kind 1: permutes all rows; kind 2: permutes the positions of a whole window */
  /* kind 2; see `EpochOrder` in order/epoch.py */
  const int64_t *block_table; /* the permutation of the full blocks if they are few; else NULL */
  Network blocks;             /* permutes the full blocks */
  Network irregular[2];       /* permute windows that have fewer rows than others; unused if n is 0 */
  uint64_t irregular_window[2];
  uint64_t window_keys[2];
  uint64_t block_rows, full, window, short_block, lacking;
  const struct Mixed *mixed; /* kind 3 */
} Order;

/* A source of a mixture; see order/mixture.py. Its rows are counted over all epochs of the mixture. In the source's own
 * order, row number c is at position c % length of epoch c / length. */
typedef struct {
  const Order *epochs; /* the source's own order in `count` epochs, from epoch `first_epoch` on */
  uint64_t first_epoch, count;
  uint64_t length;
  uint64_t before;    /* its rows before position `start` of the mixture */
  uint64_t step;      /* its rows in a table of places */
  uint64_t first_row; /* its first row index in the mixture */
} MixedSource;

/* A mixture from position `start` on: its positions repeat a table of places. */
typedef struct Mixed {
  const int32_t *source; /* the source at each place */
  const int64_t *rank;   /* for each place: how many rows of that source precede it in the table */
  uint64_t places;
  uint64_t start;
  const MixedSource *sources;
  int64_t count; /* of sources */
} Mixed;

static ALWAYS_INLINE uint32_t mixed(uint32_t x, uint64_t key, uint32_t tweak) {
  uint32_t y = x * ((uint32_t)key | 1u) + (uint32_t)(key >> 32) + tweak;
  y ^= y >> 16;
  return y * 0x85EBCA6Bu;
}

/* Replace `count` ≤ CHUNK indices by their cells. `tweaks` is NULL, or has a tweak for each index. */
static ALWAYS_INLINE void cells(const Network *net, uint64_t *indices, const uint32_t *tweaks, size_t count) {
  uint32_t left[CHUNK], right[CHUNK];
  const uint32_t k = net->k, below = ((uint32_t)1 << k) - 1, a = (uint32_t)net->a;
  for (size_t i = 0; i < count; i++) {
    left[i] = (uint32_t)(indices[i] >> k);
    right[i] = (uint32_t)indices[i] & below;
  }
  for (int round = 0; round < ROUNDS; round++) {
    const uint64_t key = net->keys[round];
    if (round % 2 == 0) {
      const uint32_t shift = 31 - k; /* shifts by 32 - k in two steps, since k may be 0 */
      if (tweaks == NULL)
        for (size_t i = 0; i < count; i++) right[i] ^= mixed(left[i], key, 0) >> 1 >> shift;
      else
        for (size_t i = 0; i < count; i++) right[i] ^= mixed(left[i], key, tweaks[i]) >> 1 >> shift;
    } else {
      for (size_t i = 0; i < count; i++) {
        const uint32_t y = mixed(right[i], key, tweaks == NULL ? 0 : tweaks[i]);
        const uint32_t sum = left[i] + (uint32_t)(((uint64_t)y * a) >> 32);
        left[i] = sum < a ? sum : sum - a;
      }
    }
  }
  for (size_t i = 0; i < count; i++) indices[i] = ((uint64_t)left[i] << k) + right[i];
}

/* Cycle walking: apply the network again and again, until the result is below n. */
static uint64_t walked(const Network *net, uint64_t index, const uint32_t *tweak) {
  do cells(net, &index, tweak, 1);
  while (index >= net->n);
  return index;
}

/* Replace `count` ≤ CHUNK indices by their images under the permutation. */
static ALWAYS_INLINE void permuted(const Network *net, uint64_t *indices, const uint32_t *tweaks, size_t count) {
  cells(net, indices, tweaks, count);
  for (size_t i = 0; i < count; i++)
    if (indices[i] >= net->n) indices[i] = walked(net, indices[i], tweaks == NULL ? NULL : &tweaks[i]);
}

/* Compute the block at each block position. The short block has its own position; the full blocks are permuted. */
static ALWAYS_INLINE void blocks_at(const Order *order, const uint64_t *block_positions, uint64_t *blocks,
                                    size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint64_t rank = block_positions[i] - (order->lacking && block_positions[i] > order->short_block);
    blocks[i] = rank < order->full ? rank : order->full - 1;
  }
  if (order->block_table != NULL)
    for (size_t i = 0; i < count; i++) blocks[i] = (uint64_t)order->block_table[blocks[i]];
  else
    permuted(&order->blocks, blocks, NULL, count);
  if (order->lacking)
    for (size_t i = 0; i < count; i++)
      if (block_positions[i] == order->short_block) blocks[i] = order->full;
}

/* Replace `count` ≤ CHUNK positions by the rows there, for kind 2. */
static ALWAYS_INLINE void blocked(const Order *order, uint64_t *rows, size_t count) {
  uint64_t inside[CHUNK], window[CHUNK], blocks[CHUNK], *block_positions = window;
  uint32_t tweaks[CHUNK];
  const uint64_t span = order->window * order->block_rows;
  const uint64_t end = (order->short_block + 1) * order->block_rows - order->lacking;
  for (size_t i = 0; i < count; i++) {
    const uint64_t padded = rows[i] + (order->lacking && rows[i] >= end ? order->lacking : 0);
    window[i] = padded / span;
    inside[i] = padded - window[i] * span;
    tweaks[i] = (uint32_t)((window[i] * order->window_keys[0] + order->window_keys[1]) >> 32);
    rows[i] = inside[i]; /* kept for the irregular windows */
  }
  permuted(&order->rows, inside, tweaks, count);
  for (int which = 0; which < 2; which++)
    if (order->irregular[which].n)
      for (size_t i = 0; i < count; i++)
        if (window[i] == order->irregular_window[which])
          inside[i] = walked(&order->irregular[which], rows[i], &tweaks[i]);
  for (size_t i = 0; i < count; i++) {
    const uint64_t padded = window[i] * span + inside[i];
    block_positions[i] = padded / order->block_rows;
    inside[i] = padded - block_positions[i] * order->block_rows;
  }
  blocks_at(order, block_positions, blocks, count);
  for (size_t i = 0; i < count; i++) rows[i] = inside[i] + blocks[i] * order->block_rows;
}

/* Replace `count` ≤ CHUNK positions in [0, n) by the rows there, for kinds 1 and 2. */
static ALWAYS_INLINE void chunk(const Order *order, uint64_t *rows, size_t count) {
  if (order->kind == 2)
    blocked(order, rows, count);
  else if (order->table != NULL)
    for (size_t i = 0; i < count; i++) rows[i] = (uint64_t)order->table[rows[i]];
  else
    permuted(&order->rows, rows, NULL, count);
}

static void chunk_anywhere(const Order *order, uint64_t *rows, size_t count) { chunk(order, rows, count); }

#if X86 /* the same code, vectorised for AVX2 and AVX-512 */
__attribute__((target("avx2"))) static void chunk_avx2(const Order *order, uint64_t *rows, size_t count) {
  chunk(order, rows, count);
}

#ifdef __clang__ /* uses vectors of 512 bits anyway, and ignores an attribute that contains an unknown word */
#define WIDEST
#else
#define WIDEST ",prefer-vector-width=512"
#endif

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl" WIDEST))) static void
chunk_avx512(const Order *order, uint64_t *rows, size_t count) {
  chunk(order, rows, count);
}
#endif

typedef void (*Chunk)(const Order *, uint64_t *, size_t);

static Chunk chunk_here(void) {
#if X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return chunk_avx512;
  if (__builtin_cpu_supports("avx2")) return chunk_avx2;
#endif
  return chunk_anywhere;
}

/* Replace `count` ≤ CHUNK ascending positions of a mixture by their rows. Returns 0 if an epoch is not in `epochs`. */
static int mixed_rows(const Mixed *mixed, Chunk of_chunk, uint64_t *rows, size_t count) {
  int32_t sources[CHUNK];
  uint64_t own[CHUNK];
  uint16_t at[CHUNK];
  uint64_t number = (rows[0] - mixed->start) / mixed->places;
  uint64_t first = mixed->start + number * mixed->places; /* the position of the table's first place */
  for (size_t i = 0; i < count; i++) {
    if (rows[i] - first >= mixed->places) {
      number = (rows[i] - mixed->start) / mixed->places;
      first = mixed->start + number * mixed->places;
    }
    const uint64_t place = rows[i] - first;
    const MixedSource *of = &mixed->sources[sources[i] = mixed->source[place]];
    rows[i] = of->before + number * of->step + (uint64_t)mixed->rank[place];
  }
  for (int64_t source = 0; source < mixed->count; source++) {
    const MixedSource *of = &mixed->sources[source];
    size_t size = 0, done = 0;
    for (size_t i = 0; i < count; i++) { /* without a branch, which would be hard to predict */
      own[size] = rows[i];
      at[size] = (uint16_t)i;
      size += sources[i] == source;
    }
    while (done < size) {
      const uint64_t epoch = own[done] / of->length, begin = epoch * of->length;
      const size_t from = done;
      if (epoch - of->first_epoch >= of->count) return 0;
      for (; done < size && own[done] - begin < of->length; done++) own[done] -= begin;
      const Order *order = &of->epochs[epoch - of->first_epoch];
      if (order->kind) of_chunk(order, own + from, done - from);
    }
    for (size_t i = 0; i < size; i++) rows[at[i]] = own[i] + of->first_row;
  }
  return 1;
}

/* Write to `rows` the rows at `count` positions: at `positions`, or, if that is NULL, at positions from `first` on.
 * POSITION_OUT_OF_RANGE: `*bad` is the first position that is not in [0, n), and no row has been written. */
static int32_t rows_at(const Order *order, const int64_t *positions, int64_t first, int64_t count, int64_t *rows,
                       int64_t *bad) {
  if (order == NULL || rows == NULL || bad == NULL || count < 0) return BAD_ARGUMENT;
  const uint64_t n = order->n;
  if (positions != NULL) {
    for (int64_t i = 0; i < count; i++)
      if ((uint64_t)positions[i] >= n) return *bad = positions[i], POSITION_OUT_OF_RANGE;
  } else if (count && (first < 0 || (uint64_t)first >= n || (uint64_t)count > n - (uint64_t)first)) {
    return *bad = first < 0 || (uint64_t)first >= n ? first : (int64_t)n, POSITION_OUT_OF_RANGE;
  }
  const Chunk of_chunk = chunk_here();
  for (int64_t start = 0; start < count; start += CHUNK) {
    const size_t size = (size_t)(count - start < CHUNK ? count - start : CHUNK);
    uint64_t *part = (uint64_t *)rows + start;
    if (positions != NULL)
      memcpy(part, positions + start, size * sizeof(*part));
    else
      for (size_t i = 0; i < size; i++) part[i] = (uint64_t)(first + start) + i;
    if (order->kind == 3) {
      if (!mixed_rows(order->mixed, of_chunk, part, size)) return BAD_ARGUMENT;
    } else if (order->kind) {
      of_chunk(order, part, size);
    }
  }
  return OK;
}

/* ---- gather --------------------------------------------------------------------------------------------------- */

/* The rows of one leaf, which are numbered over all segments. Inside a segment, rows lie at equal distances. */
typedef struct {
  const unsigned char *const *bases; /* of each segment: the address of its first row */
  const int64_t *strides;            /* of each segment: bytes from one row to the next */
  const int64_t *ends;               /* of each segment: the row after its last */
  const int32_t *buckets;            /* of each 2^shift rows: the segment of the first row, or an earlier segment */
  int64_t segments;
  int64_t shift;
  const int64_t *offsets; /* the columns to copy are runs of bytes: where each run begins in a row */
  int64_t runs;
  int64_t run_bytes;
} Leaf;

/* The addresses of a leaf's rows. If there is only `one` segment, its base is copied here. Without this copy, the
 * compiler would have to load the base again after each row, since the bytes written might alias it. */
typedef struct {
  Leaf leaf;
  const unsigned char *base;
  int64_t stride;
  int one;
} Source;

static ALWAYS_INLINE const unsigned char *address(const Source *at, int64_t row) {
  if (at->one) return at->base + row * at->stride;
  int64_t segment = at->leaf.buckets[row >> at->leaf.shift];
  while (row >= at->leaf.ends[segment]) segment++;
  const int64_t first = segment ? at->leaf.ends[segment - 1] : 0;
  return at->leaf.bases[segment] + (row - first) * at->leaf.strides[segment];
}

/* The processor learns the address of a row only when the copy of this row begins, and would then wait for the row's
 * first cache lines. So these lines are fetched while an earlier row is copied: the row 1 KiB before, or the previous
 * row if rows are longer. The processor itself prefetches the rest of a long row. Fetching more lines, or fetching them
 * earlier, made the copy slower; 0.5 to 4 KiB were tried for both. */
#define AHEAD_BYTES 1024
#define FETCHED_BYTES 512

typedef struct {
  int64_t ahead; /* how many rows ahead */
  int64_t bytes; /* how many bytes of a row */
} Prefetch;

static ALWAYS_INLINE Prefetch prefetch_of(int64_t size) {
  const Prefetch fetch = {size < AHEAD_BYTES ? AHEAD_BYTES / size : 1, size < FETCHED_BYTES ? size : FETCHED_BYTES};
  return fetch;
}

/* Fetch the beginning of the row that is copied `fetch.ahead` rows after rows[i]. */
static ALWAYS_INLINE void prefetch(const Source *at, Prefetch fetch, const int64_t *rows, int64_t count, int64_t i) {
  if (i >= count - fetch.ahead) return;
  const unsigned char *row = address(at, rows[i + fetch.ahead]) + at->leaf.offsets[0];
  for (int64_t byte = 0; byte < fetch.bytes; byte += 64) __builtin_prefetch(row + byte);
}

/* Copy rows that are one run of SIZE bytes. The compiler knows SIZE, so a copy is as fast as an assignment. */
#define COPY_ROWS(SIZE)                                                                                            \
  case SIZE:                                                                                                       \
    for (int64_t i = 0; i < count; i++) memcpy(out + i * out_stride, address(&at, rows[i]) + first, SIZE);          \
    return

static ALWAYS_INLINE void copied(Source at, const int64_t *rows, int64_t count, unsigned char *out, int64_t out_stride) {
  const int64_t runs = at.leaf.runs, first = at.leaf.offsets[0];
  const size_t size = (size_t)at.leaf.run_bytes;
  if (runs == 1) {
    switch (size) {
      COPY_ROWS(1);
      COPY_ROWS(2);
      COPY_ROWS(4);
      COPY_ROWS(8);
      COPY_ROWS(16);
      COPY_ROWS(32);
      COPY_ROWS(64);
    }
    const Prefetch fetch = prefetch_of((int64_t)size);
    for (int64_t i = 0; i < count; i++) {
      prefetch(&at, fetch, rows, count, i);
      memcpy(out + i * out_stride, address(&at, rows[i]) + first, size);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    const unsigned char *row = address(&at, rows[i]);
    unsigned char *to = out + i * out_stride;
    for (int64_t run = 0; run < runs; run++, to += size) memcpy(to, row + at.leaf.offsets[run], size);
  }
}

#if X86
/* `copied` with stores of 16 bytes that bypass the cache. `out` and all runs in it are aligned to 16 bytes. */
static ALWAYS_INLINE void streamed(Source at, const int64_t *rows, int64_t count, unsigned char *out,
                                   int64_t out_stride) {
  const int64_t runs = at.leaf.runs, size = at.leaf.run_bytes;
  const Prefetch fetch = prefetch_of(size);
  for (int64_t i = 0; i < count; i++) {
    prefetch(&at, fetch, rows, count, i);
    const unsigned char *row = address(&at, rows[i]);
    unsigned char *to = out + i * out_stride;
    for (int64_t run = 0; run < runs; run++, to += size) {
      const unsigned char *from = row + at.leaf.offsets[run];
      for (int64_t byte = 0; byte < size; byte += 16)
        _mm_stream_si128((__m128i *)(to + byte), _mm_loadu_si128((const __m128i *)(from + byte)));
    }
  }
  _mm_sfence(); /* makes these stores visible before any later store, such as a flag that the batch is complete */
}
#endif

/* A copy of rows of a leaf: row i goes to out + i * out_stride. */
typedef struct {
  const Leaf *leaf;
  unsigned char *out;
  int64_t out_stride;
  int64_t stream; /* bypass the cache, if the alignment allows it */
} Copy;

/* Copy rows, which must be in range. */
static __attribute__((noinline)) void copy_rows(const Copy *copy, const int64_t *rows, int64_t count) {
  const Leaf *leaf = copy->leaf;
  unsigned char *out = copy->out;
  const int64_t out_stride = copy->out_stride;
  const Source one = {*leaf, leaf->bases[0], leaf->strides[0], 1}, several = {*leaf, NULL, 0, 0};
#if X86
  if (copy->stream && leaf->run_bytes % 16 == 0 && out_stride % 16 == 0 && (uintptr_t)out % 16 == 0) {
    if (leaf->segments == 1)
      streamed(one, rows, count, out, out_stride);
    else
      streamed(several, rows, count, out, out_stride);
    return;
  }
#endif
  if (leaf->segments == 1)
    copied(one, rows, count, out, out_stride);
  else
    copied(several, rows, count, out, out_stride);
}

/* The first of the rows that contains the address `lost`; -1 if no row does. */
static int64_t row_at(const Leaf *leaf, const void *lost, const int64_t *rows, int64_t count) {
  const Source at = {*leaf, NULL, 0, 0};
  for (int64_t i = 0; i < count; i++) {
    const uintptr_t row = (uintptr_t)address(&at, rows[i]);
    for (int64_t run = 0; run < leaf->runs; run++)
      if ((uintptr_t)lost - (row + (uintptr_t)leaf->offsets[run]) < (uintptr_t)leaf->run_bytes) return rows[i];
  }
  return -1;
}

/* Copy row rows[i] of the leaf to row i of `out`.
 * ROW_OUT_OF_RANGE: `bad[0]` is the first row that is in no segment, and nothing has been copied. MEMORY_LOST:
 * `bad[0]` is a row that could not be copied, since memory was lost at the address `bad[1]`; some rows may have been
 * copied. If the address is unknown, or lies in `out`, `bad[0]` is -1. */
EXPORT int32_t feedline_gather(const Copy *copy, const int64_t *rows, int64_t count, int64_t *bad) {
  if (copy == NULL || copy->leaf == NULL || copy->out == NULL || rows == NULL || bad == NULL || count < 0 ||
      copy->leaf->segments < 1)
    return BAD_ARGUMENT;
  const Leaf *leaf = copy->leaf;
  const uint64_t n = (uint64_t)leaf->ends[leaf->segments - 1];
  for (int64_t i = 0; i < count; i++)
    if ((uint64_t)rows[i] >= n) return *bad = rows[i], ROW_OUT_OF_RANGE;
  if (leaf->runs < 1 || leaf->run_bytes < 1) return OK; /* rows of no bytes */
  Guard guard;
  if (LOST_MEMORY(guard)) {
    bad[0] = row_at(copy->leaf, guard.address, rows, count);
    bad[1] = (int64_t)(uintptr_t)guard.address;
    return MEMORY_LOST;
  }
  copy_rows(copy, rows, count);
  lost_memory_release(&guard);
  return OK;
}

/* Write the rows at `count` positions to `rows` (see rows_at), and copy these rows of each leaf.
 * Returns the error of the order, or of the first leaf with an error; the leaves before it have been copied.
 * `bad` has two elements, as for feedline_gather. */
EXPORT int32_t feedline_fill(const Order *order, const int64_t *positions, int64_t first, int64_t count,
                             int64_t *rows, const Copy *copies, int64_t leaves, int64_t *bad) {
  if (copies == NULL || leaves < 0) return BAD_ARGUMENT;
  int32_t code = rows_at(order, positions, first, count, rows, bad);
  for (int64_t leaf = 0; leaf < leaves && code == OK; leaf++) code = feedline_gather(&copies[leaf], rows, count, bad);
  return code;
}

/* ---- spans ---------------------------------------------------------------------------------------------------- */

/* Replace indices[i] by its image under permutation tweaks[i] of [0, sizes[i]). Sizes are at least 1. */
EXPORT int32_t feedline_permute(const int64_t *sizes, const uint64_t *keys, const uint32_t *tweaks, int64_t *indices,
                                int64_t count) {
  if (sizes == NULL || keys == NULL || tweaks == NULL || indices == NULL || count < 0) return BAD_ARGUMENT;
  Network net = {0};
  memcpy(net.keys, keys, sizeof(net.keys));
  for (int64_t i = 0; i < count; i++) {
    const uint64_t n = (uint64_t)sizes[i];
    if (n != net.n) {
      const uint32_t bits = n > 1 ? 64 - (uint32_t)__builtin_clzll(n - 1) : 0; /* the bits of n - 1 */
      net.n = n, net.k = bits / 2, net.a = ((n - 1) >> net.k) + 1;
    }
    if (n == 0 || (uint64_t)indices[i] >= n) return POSITION_OUT_OF_RANGE;
    indices[i] = (int64_t)walked(&net, (uint64_t)indices[i], &tweaks[i]);
  }
  return OK;
}

/* Spans of values. The spans of a row of a batch are written one after the other. */
typedef struct {
  const int64_t *row; /* ascending */
  const int64_t *first;
  const int64_t *count;
  int64_t spans;
} Spans;

/* Write `count` uint16 values as int32. Neither `from` nor `to` has to be aligned. */
static void widen(const unsigned char *restrict from, int64_t count, unsigned char *restrict to) {
  for (int64_t i = 0; i < count; i++) {
    uint16_t narrow;
    memcpy(&narrow, from + 2 * i, sizeof(narrow));
    const int32_t wide = narrow;
    memcpy(to + 4 * i, &wide, sizeof(wide));
  }
}

static void copy_spans(const Leaf *leaf, const Spans *spans, unsigned char *out, int64_t out_stride, int64_t length,
                       int64_t size) {
  const Source at = {*leaf, leaf->bases[0], leaf->strides[0], leaf->segments == 1};
  unsigned char *to = out;
  for (int64_t i = 0; i < spans->spans; i++) {
    if (i == 0 || spans->row[i] != spans->row[i - 1]) to = out + spans->row[i] * out_stride;
    if (i + 1 < spans->spans) {
      const unsigned char *next = address(&at, spans->first[i + 1]);
      const int64_t bytes = spans->count[i + 1] * leaf->run_bytes;
      for (int64_t byte = 0; byte < (bytes < FETCHED_BYTES ? bytes : FETCHED_BYTES); byte += 64)
        __builtin_prefetch(next + byte);
    }
    const unsigned char *from = address(&at, spans->first[i]);
    if (size == leaf->run_bytes)
      memcpy(to, from, (size_t)(spans->count[i] * size));
    else
      widen(from, spans->count[i], to);
    to += spans->count[i] * size;
    if (i + 1 == spans->spans || spans->row[i + 1] != spans->row[i])
      memset(to, 0, (size_t)(out + spans->row[i] * out_stride + length * size - to));
  }
}

/* Copy the values of spans into the rows of `out`, which have `length` values of `size` bytes each, and write zeros
 * after the last span of a row. The rows of the leaf are adjacent. Each is one value of `size` bytes, or a uint16 that
 * becomes an int32. ROW_OUT_OF_RANGE: `bad[0]` is the number of a span that is not within one segment, or does not
 * fit its row, and nothing has been copied. MEMORY_LOST: `bad[0]` is -1, and `bad[1]` is the address of lost memory. */
EXPORT int32_t feedline_spans(const Leaf *leaf, const Spans *spans, unsigned char *out, int64_t out_stride,
                              int64_t length, int64_t size, int64_t *bad) {
  if (leaf == NULL || spans == NULL || out == NULL || bad == NULL || leaf->segments < 1 ||
      (leaf->run_bytes != size && (leaf->run_bytes != 2 || size != 4)))
    return BAD_ARGUMENT;
  const uint64_t n = (uint64_t)leaf->ends[leaf->segments - 1];
  int64_t done = 0;
  for (int64_t i = 0; i < spans->spans; i++) {
    const uint64_t first = (uint64_t)spans->first[i], count = (uint64_t)spans->count[i];
    if (i && spans->row[i] != spans->row[i - 1]) done = 0;
    if (first >= n || count < 1 || count > (uint64_t)(length - done)) return *bad = i, ROW_OUT_OF_RANGE;
    int64_t segment = leaf->buckets[first >> leaf->shift];
    while (first >= (uint64_t)leaf->ends[segment]) segment++;
    if (count > (uint64_t)leaf->ends[segment] - first || leaf->strides[segment] != leaf->run_bytes)
      return *bad = i, ROW_OUT_OF_RANGE;
    done += (int64_t)count;
  }
  Guard guard;
  if (LOST_MEMORY(guard)) {
    bad[0] = -1;
    bad[1] = (int64_t)(uintptr_t)guard.address;
    return MEMORY_LOST;
  }
  copy_spans(leaf, spans, out, out_stride, length, size);
  lost_memory_release(&guard);
  return OK;
}

/* Write for each value the number of its span in the row, from 1, and its offset in the span. Write zeros after the
 * last span of a row. Spans must fit their rows. Strides are in bytes. */
EXPORT int32_t feedline_mark(const Spans *spans, int64_t length, unsigned char *numbers, int64_t number_stride,
                             unsigned char *places, int64_t place_stride) {
  if (spans == NULL || numbers == NULL || places == NULL) return BAD_ARGUMENT;
  int64_t done = 0;
  int32_t number = 0;
  for (int64_t i = 0; i < spans->spans; i++) {
    int32_t *of = (int32_t *)(numbers + spans->row[i] * number_stride);
    int32_t *at = (int32_t *)(places + spans->row[i] * place_stride);
    const int64_t count = spans->count[i];
    number++;
    for (int64_t j = 0; j < count; j++) of[done + j] = number;
    for (int64_t j = 0; j < count; j++) at[done + j] = (int32_t)j;
    done += count;
    if (i + 1 == spans->spans || spans->row[i + 1] != spans->row[i]) {
      memset(of + done, 0, (size_t)(length - done) * sizeof(*of));
      memset(at + done, 0, (size_t)(length - done) * sizeof(*at));
      done = 0, number = 0;
    }
  }
  return OK;
}

/* ---- reads from a file ---------------------------------------------------------------------------------------- */

/* Read the `length` bytes at offsets[i] of an open file into row places[i] of `out`, whose rows are contiguous.
 * Returns `count`, or less if a row lies beyond the end of the file or cannot be read. */
EXPORT int64_t feedline_read(int32_t descriptor, const int64_t *offsets, const int64_t *places, int64_t count,
                             int64_t length, unsigned char *out) {
  if (offsets == NULL || places == NULL || out == NULL || length < 0) return -1;
  for (int64_t i = 0, end; i < count; i = end) {
    for (end = i + 1; end < count; end++) /* adjacent rows are read at once */
      if (offsets[end] != offsets[end - 1] + length || places[end] != places[end - 1] + 1) break;
    int64_t offset = offsets[i], left = (end - i) * length;
    for (unsigned char *to = out + places[i] * length; left > 0;) {
      const ssize_t got = pread(descriptor, to, (size_t)left, (off_t)offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return i;
      to += got, offset += got, left -= got;
    }
  }
  return count;
}
