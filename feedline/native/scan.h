/* The Huffman codes of a baseline JPEG's scan, faster than libjpeg-turbo reads them, and only where the data are whole.
 *
 * What is unusual or damaged makes a function return DAMAGED, and the caller leaves the image to libjpeg-turbo. Bytes
 * are copied without their stuffing, a restart interval at a time, and followed by zeros: so eight bytes can be read
 * at once without a check, and one check for a block is enough.
 */

#ifndef FEEDLINE_SCAN_H
#define FEEDLINE_SCAN_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define RARE(condition) __builtin_expect(!!(condition), 0)
#else
#define INLINE static inline
#define RARE(condition) (condition)
#endif

enum { FINE = 0, DAMAGED = 1 };

#define LOOK 10   /* bits of a code that are looked up at once */
#define LONGEST 16 /* bits of a code */
#define PAD 512   /* bytes after the data: a block has at most 64 × (16 + 15) bits */
#define AT_END 128 /* coefficients: more than any block has */
#define NO_CODE 255
#define END_OF_IMAGE 0xD9
#define FIRST_RESTART 0xD0

/* What a code means: its bits and those of its value (bits 0 to 7; 0: it is longer than LOOK), those of its value
 * (8 to 15), and how many zeros are before it (16 to 31). */
typedef uint32_t Code;
#define BITS(code) ((code) & 255)
#define SIZE(code) ((code) >> 8 & 255)
#define RUN(code) ((code) >> 16)

typedef struct {
  uint8_t counts[LONGEST + 1], symbols[256]; /* what it was made of: the bits and huffval of a JHUFF_TBL */
  Code codes[1 << LOOK];
  uint32_t values[1 << LOOK], past[1 << LOOK]; /* see `make_lookups` */
  int32_t largest[LONGEST + 1]; /* code of each length; -1: there is none */
  int32_t offset[LONGEST + 1];  /* of its symbol, less the code */
} Table;

typedef struct {
  const uint8_t *next; /* the first byte that is not wholly in `buffer` */
  const uint8_t *end;  /* of the interval */
  uint64_t buffer;     /* the next bits, from the highest bit on */
  int64_t count;       /* how many of them are valid */
} Bits;

typedef struct {
  const uint8_t *data, *data_end; /* what was not copied yet */
  uint8_t *copy;                  /* memory for as much, and PAD bytes */
  int marker;                     /* that ended the interval */
  Bits bits;
} Interval;

/* In the order of the coefficients: their places in a block. What is after the last one is written to its place: a 0 at
 * the end of a block, before which that place is 0, or a value of a damaged block. */
#define FOUR_LAST 63, 63, 63, 63
#define MANY_LAST FOUR_LAST, FOUR_LAST, FOUR_LAST, FOUR_LAST
static const uint8_t PLACES[64 + AT_END] = {
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46,
    53, 60, 61, 54, 47, 55, 62, 63,
    MANY_LAST, MANY_LAST, MANY_LAST, MANY_LAST, MANY_LAST, MANY_LAST, MANY_LAST, MANY_LAST};
#undef MANY_LAST
#undef FOUR_LAST

static Code code_of(int length, uint8_t symbol, int is_dc) {
  uint32_t size = symbol & 15;
  return ((uint32_t)length + size) | size << 8 | (is_dc ? 0u : (uint32_t)symbol >> 4) << 16;
}

/* The value of `size` bits that follows the first `before` bits (JPEG's F.2.2.1): the lower half of its range is
 * negative. */
INLINE int16_t value_of(uint64_t buffer, uint64_t before, uint64_t size) {
  uint64_t value = buffer << (before & 63);
  int32_t negative = ~(int32_t)((int64_t)value >> 63);
  return (int16_t)((int32_t)(value >> 1 >> (63 - size)) + (negative & (1 - (1 << size))));
}

/* For LOOK bits:
 *
 *   values  a code whose value lies in them: the bits that both take (bits 0 to 7), how many coefficients that is (8 to
 *           15), and the value of the last (16 to 31). The end of a block is as many as AT_END, the last of them 0
 *   past    all codes that lie in them, though maybe not all bits of the last value: the bits that they take with their
 *           values, and how many coefficients that is (8 to 31)
 *
 * 0: there is no such code. */
static void make_lookups(Table *table) {
  for (uint32_t i = 0; i < 1 << LOOK; i++) {
    uint32_t bits = 0, passed = 0;
    table->values[i] = 0;
    while (bits < LOOK && passed < 64 - 16) { /* so that no more than one block is passed */
      Code code = table->codes[i << bits & ((1 << LOOK) - 1)];
      if (code == 0 || bits + BITS(code) - SIZE(code) > LOOK)
        break;
      uint32_t more = SIZE(code) == 0 && RUN(code) != 15 ? AT_END : RUN(code) + 1;
      if (bits == 0 && BITS(code) <= LOOK) {
        uint64_t value = (uint16_t)value_of((uint64_t)i << (64 - LOOK), BITS(code) - SIZE(code), SIZE(code));
        table->values[i] = BITS(code) | more << 8 | (uint32_t)value << 16;
      }
      bits += BITS(code);
      passed += more;
    }
    table->past[i] = bits | passed << 8;
  }
}

/* `counts` and `symbols` are the bits and huffval of a JHUFF_TBL. A table that is made of them already is kept. */
static int make_table(Table *table, const uint8_t *counts, const uint8_t *symbols, int is_dc) {
  int32_t code = 0, first = 0;
  if (table->counts[0] && !memcmp(table->counts + 1, counts + 1, LONGEST) && !memcmp(table->symbols, symbols, 256))
    return FINE;
  table->counts[0] = 0;
  memset(table->codes, 0, sizeof table->codes);
  memcpy(table->symbols, symbols, sizeof table->symbols);
  for (int length = 1; length <= LONGEST; length++, code <<= 1) {
    int32_t count = counts[length];
    if (first + count > 256 || code + count > 1 << length)
      return DAMAGED;
    table->offset[length] = first - code;
    table->largest[length] = count ? code + count - 1 : -1;
    for (; count; count--, code++, first++) {
      if (is_dc && symbols[first] > 15)
        return DAMAGED;
      int spare = LOOK - length;
      for (int32_t i = 0; spare >= 0 && i < 1 << spare; i++)
        table->codes[(code << spare) + i] = code_of(length, symbols[first], is_dc);
    }
  }
  if (!is_dc)
    make_lookups(table);
  memcpy(table->counts + 1, counts + 1, LONGEST);
  table->counts[0] = 1; /* the table is complete */
  return FINE;
}

/* A code of more than LOOK bits; 0: there is no such code. */
static Code long_code(const Table *table, uint64_t buffer, int is_dc) {
  for (int length = LOOK + 1; length <= LONGEST; length++) {
    int32_t code = (int32_t)(buffer >> (64 - length));
    if (code <= table->largest[length])
      return code_of(length, table->symbols[(table->offset[length] + code) & 255], is_dc);
  }
  return 0;
}

INLINE void refill(Bits *bits) {
  uint64_t word;
  memcpy(&word, bits->next, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#else
  word = __builtin_bswap64(word);
#endif
  bits->buffer |= word >> bits->count;
  bits->next += (63 - bits->count) >> 3;
  bits->count |= 56;
}

INLINE Code code_at(uint64_t buffer, const Table *table, int is_dc) {
  Code code = table->codes[buffer >> (64 - LOOK)];
  return RARE(code == 0) ? long_code(table, buffer, is_dc) : code;
}

INLINE void consume(Bits *bits, uint64_t code) {
  bits->buffer <<= code & 63;
  bits->count -= (int64_t)BITS(code);
}

/* The coefficients of a code after number k. Returns how far that leads. */
static inline uint32_t by_code(Bits *bits, const Table *table, uint32_t k, int16_t *block) {
  refill(bits);
  uint64_t buffer = bits->buffer;
  Code code = code_at(buffer, table, 0);
  consume(bits, code);
  refill(bits);
  if (SIZE(code) == 0 && RUN(code) != 15)
    return k + (code == 0 ? NO_CODE : AT_END);
  k += RUN(code);
  if (block)
    block[PLACES[k]] = value_of(buffer, BITS(code) - SIZE(code), SIZE(code));
  return k + 1;
}

/* The same by one look-up, for one code or, without `block`, for several. */
INLINE uint32_t by_look(Bits *bits, const Table *table, uint32_t k, int16_t *block) {
  uint32_t found = (block ? table->values : table->past)[bits->buffer >> (64 - LOOK)];
  uint32_t next = k + (block ? found >> 8 & 255 : found >> 8);
  if (RARE(found == 0 || (!block && next % AT_END > 63)))
    return by_code(bits, table, k, block);
  if (block)
    block[PLACES[next - 1]] = (int16_t)(found >> 16);
  consume(bits, found);
  return next;
}

/* The coefficients of a block: without `block` they are only passed over. */
INLINE int read_block(Bits *bits, const Table *dc, const Table *ac, int32_t *last_dc, int16_t *block) {
  refill(bits);
  Code code = code_at(bits->buffer, dc, 1);
  *last_dc += value_of(bits->buffer, BITS(code) - SIZE(code), SIZE(code));
  consume(bits, code);
  if (block)
    block[0] = (int16_t)*last_dc;
  uint32_t k = code == 0 ? NO_CODE : 1;
  while (k < 64) {
    refill(bits); /* at least 56 bits: two look-ups take no more than LOOK + 15 each, and LOOK with a `block` */
    k = by_look(bits, ac, k, block);
    if (k < 64)
      k = by_look(bits, ac, k, block);
    if (block && k < 64)
      k = by_look(bits, ac, k, block);
    if (block && k < 64)
      k = by_look(bits, ac, k, block);
  }
  int64_t left = (bits->end - bits->next) * 8 + bits->count;
  int ends = k == 64 || (k > AT_END && k <= AT_END + 63);
  return ends && left >= 0 && *last_dc == (int16_t)*last_dc ? FINE : DAMAGED;
}

/* Copy the bytes up to the next marker. */
static int next_interval(Interval *interval) {
  uint8_t *end = interval->copy;
  for (;;) {
    size_t left = (size_t)(interval->data_end - interval->data);
    const uint8_t *found = left > 1 ? memchr(interval->data, 0xFF, left - 1) : NULL;
    if (found == NULL)
      return DAMAGED;
    size_t length = (size_t)(found - interval->data);
    memcpy(end, interval->data, length);
    end += length;
    interval->data = found + 2;
    interval->marker = found[1];
    if (found[1] != 0)
      break;
    *end++ = 0xFF;
  }
  memset(end, 0, PAD);
  Bits bits = {interval->copy, end, 0, 0};
  interval->bits = bits;
  return FINE;
}

/* Whether all bits of the interval have been read, but for those that fill its last byte. */
INLINE int at_end(const Interval *interval) {
  const Bits *bits = &interval->bits;
  return (uint64_t)((bits->end - bits->next) * 8 + bits->count) < 8;
}

#endif
