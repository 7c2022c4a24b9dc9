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
#define WIDE 11   /* bits in which several codes are looked up at once */
#define LONGEST 16 /* bits of a code */
#define PAD 512   /* bytes after the data: a block has at most 64 × (16 + 15) bits */
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
  uint64_t pairs[1 << WIDE]; /* see `make_wide` */
  uint32_t past[1 << WIDE];
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

/* In the order of the coefficients: their places in a block. The rest is for runs that lead out of the block. */
static const uint8_t PLACES[64 + 32] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63};

static Code code_of(int length, uint8_t symbol, int is_dc) {
  uint32_t size = symbol & 15;
  return ((uint32_t)length + size) | size << 8 | (is_dc ? 0u : (uint32_t)symbol >> 4) << 16;
}

/* For WIDE bits, of which the codes that lie in them are known, though not all bits of the last value:
 *
 *   past   any number of codes: the bits they take with their values (bits 0 to 7), whether a block ends after them
 *          (8), and how many coefficients they are (16 to 31); 0: no code lies in the bits
 *   pairs  one code or two: their bits (0 to 7), the bits before the values (8 and 16) and of them (24 and 32), the
 *          zeros before them (40 and 48), whether a block ends (56), how many coefficients they are (57 to 63)
 *
 * The end of a block, and 16 zeros, count as codes with values of 0 bits. */
static void make_wide(Table *table) {
  for (uint32_t i = 0; i < 1 << WIDE; i++) {
    uint64_t pair = 0;
    uint32_t bits = 0, passed = 0, ends = 0, count = 0;
    while (!ends && bits < WIDE) {
      Code code = table->codes[(i << bits & ((1 << WIDE) - 1)) >> (WIDE - LOOK)];
      if (code == 0 || bits + BITS(code) - SIZE(code) > WIDE)
        break;
      uint32_t before = bits + BITS(code) - SIZE(code);
      bits += BITS(code);
      ends = SIZE(code) == 0 && RUN(code) != 15;
      passed += ends ? 0 : RUN(code) + 1;
      if (count < 2) {
        int second = (int)(8 * count);
        pair |= (uint64_t)before << (8 + second) | (uint64_t)SIZE(code) << (24 + second);
        pair |= (uint64_t)(ends ? 0 : RUN(code)) << (40 + second);
        pair = (pair & ~(uint64_t)255 & ~((uint64_t)255 << 56)) | bits | (uint64_t)ends << 56 | (uint64_t)passed << 57;
      }
      count++;
    }
    table->past[i] = bits | ends << 8 | passed << 16;
    table->pairs[i] = pair;
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
    make_wide(table);
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

/* The value of `size` bits that follows the first `before` bits (JPEG's F.2.2.1): the lower half of its range is
 * negative. */
INLINE int16_t value_of(uint64_t buffer, uint64_t before, uint64_t size) {
  uint64_t value = buffer << (before & 63);
  int32_t negative = ~(int32_t)((int64_t)value >> 63);
  return (int16_t)((int32_t)(value >> 1 >> (63 - size)) + (negative & (1 - (1 << size))));
}

INLINE void consume(Bits *bits, uint64_t code) {
  bits->buffer <<= code & 63;
  bits->count -= (int64_t)BITS(code);
}

enum { ON, RARELY, LAST };

/* The next coefficients from number *k on, by a wide table. RARELY: nothing is done, and `step_by_one` must. */
INLINE int step(Bits *bits, const Table *table, uint32_t *k, int16_t *block) {
  uint64_t buffer = bits->buffer;
  if (block) {
    uint64_t pair = table->pairs[buffer >> (64 - WIDE)];
    uint32_t one = *k + (uint8_t)(pair >> 40), two = one + 1 + (uint8_t)(pair >> 48);
    if (RARE(pair == 0 || one > 62))
      return RARELY;
    block[PLACES[two]] = value_of(buffer, (uint8_t)(pair >> 16), (uint8_t)(pair >> 32));
    block[PLACES[one]] = value_of(buffer, (uint8_t)(pair >> 8), (uint8_t)(pair >> 24));
    consume(bits, pair);
    *k += (uint32_t)(pair >> 57);
    return pair >> 56 & 1 ? LAST : ON;
  }
  uint32_t past = table->past[buffer >> (64 - WIDE)];
  if (RARE(past == 0 || *k + (past >> 16) > 63))
    return RARELY;
  consume(bits, past);
  *k += past >> 16;
  return past >> 8 & 1 ? LAST : ON;
}

/* One code. */
static inline int step_by_one(Bits *bits, const Table *table, uint32_t *k, int16_t *block) {
  refill(bits);
  uint64_t buffer = bits->buffer;
  Code code = code_at(buffer, table, 0);
  consume(bits, code);
  if (code == 0)
    *k = 99; /* there is no such code */
  if (code == 0 || (SIZE(code) == 0 && RUN(code) != 15))
    return LAST;
  *k += RUN(code);
  if (block)
    block[PLACES[*k]] = value_of(buffer, BITS(code) - SIZE(code), SIZE(code));
  ++*k;
  return ON;
}

/* The coefficients of a block: without `block` they are only passed over. */
INLINE int read_block(Bits *bits, const Table *dc, const Table *ac, int32_t *last_dc, int16_t *block) {
  refill(bits);
  Code code = code_at(bits->buffer, dc, 1);
  *last_dc += value_of(bits->buffer, BITS(code) - SIZE(code), SIZE(code));
  consume(bits, code);
  if (block)
    block[0] = (int16_t)*last_dc;
  uint32_t k = code == 0 ? 99 : 1;
  while (k < 64) {
    refill(bits); /* at least 56 bits, and two steps take no more than WIDE + 15 each */
    int done = step(bits, ac, &k, block);
    if (done == ON && k < 64)
      done = step(bits, ac, &k, block);
    if (RARE(done == RARELY))
      done = step_by_one(bits, ac, &k, block);
    if (done == LAST)
      break;
  }
  int64_t left = (bits->end - bits->next) * 8 + bits->count;
  return k <= 64 && left >= 0 && *last_dc == (int16_t)*last_dc ? FINE : DAMAGED;
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
