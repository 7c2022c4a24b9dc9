/* A part of a JPEG as RGB, by libjpeg-turbo, with no more work than the part needs.
 *
 * C11 without the Python API: ctypes loads it and releases the interpreter's lock during each call. This file is not
 * linked with libjpeg-turbo: the caller passes the addresses of its functions, so the library may come with Pillow.
 * No state is kept between calls, so any number of threads may call at a time.
 *
 * libjpeg-turbo reads the headers, transforms, and converts colours. The Huffman codes, which take most of the time,
 * are read by scan.h. An image that is damaged, or of an unusual kind, is left to the caller.
 */

#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>

#include "libjpeg/jpeglib.h"
#include "scan.h"

#define EXPORT __attribute__((visibility("default")))

/* Increased whenever a struct or a function changes; the binding refuses any other version. */
#define INTERFACE 1

enum { DECODED = 0, DECODE_WHOLE = 1 };

#define ROWS 4 /* that are asked for at once */

/* The functions of libjpeg-turbo, in the order of FUNCTIONS in jpeg.py. */
typedef struct {
  struct jpeg_error_mgr *(*std_error)(struct jpeg_error_mgr *);
  void (*create)(j_decompress_ptr, int, size_t);
  void (*mem_src)(j_decompress_ptr, const unsigned char *, unsigned long);
  int (*read_header)(j_decompress_ptr, boolean);
  boolean (*has_multiple_scans)(const struct jpeg_decompress_struct *);
  boolean (*start)(j_decompress_ptr);
  void (*crop)(j_decompress_ptr, JDIMENSION *, JDIMENSION *);
  JDIMENSION (*skip)(j_decompress_ptr, JDIMENSION);
  JDIMENSION (*read)(j_decompress_ptr, JSAMPARRAY, JDIMENSION);
  void (*destroy)(j_decompress_ptr);
} Libjpeg;

/* The first fields of libjpeg-turbo's own struct, which have been the same in all of its versions. */
struct jpeg_entropy_decoder {
  void (*start_pass)(j_decompress_ptr);
  boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

/* A part of the image at its reduced scale, in pixels, and where it goes. */
typedef struct {
  uint32_t eighths; /* the scale */
  uint32_t top, left, height, width;
  uint32_t first; /* set to the column of the image that a row of `out` begins with, at most `left` */
  uint8_t *out;   /* rows of width + MARGIN pixels, RGB */
} Part;

#define CONTEXT 8 /* columns beside the part that are decoded, too */
#define MARGIN 48 /* pixels: CONTEXT on both sides, and an MCU's width */

typedef struct {
  struct jpeg_error_mgr errors;
  jmp_buf leave;
  Interval interval;
  Table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
  int32_t last_dc[MAX_COMPS_IN_SCAN];
  JDIMENSION column, first_column, end_column; /* of MCUs: the next, and those whose coefficients are needed */
  uint64_t mcus_read;
  unsigned int restarts, mcus_to_restart;
} State;

static void leave(j_common_ptr image) { longjmp(((State *)image->client_data)->leave, 1); }

/* A warning (level -1) says that the data are damaged. */
static void leave_at_warning(j_common_ptr image, int level) {
  if (level < 0)
    leave(image);
}

INLINE int read_blocks(State *state, j_decompress_ptr image, JBLOCKROW *blocks) {
  Bits bits = state->interval.bits;
  int damaged = FINE;
  for (int i = 0; i < image->blocks_in_MCU; i++) {
    int component = image->MCU_membership[i];
    const jpeg_component_info *info = image->cur_comp_info[component];
    damaged |= read_block(&bits, &state->dc[info->dc_tbl_no], &state->ac[info->ac_tbl_no],
                          &state->last_dc[component], blocks ? *blocks[i] : NULL);
    if (RARE(damaged))
      break;
  }
  state->interval.bits = bits;
  return damaged;
}

static void restart(State *state, j_decompress_ptr image) {
  int expected = FIRST_RESTART + (int)(state->restarts++ & 7);
  if (!at_end(&state->interval) || state->interval.marker != expected || next_interval(&state->interval) != FINE)
    leave((j_common_ptr)image);
  memset(state->last_dc, 0, sizeof state->last_dc);
  state->mcus_to_restart = image->restart_interval;
}

/* In place of libjpeg-turbo's own function: the coefficients of the next MCU. */
static boolean decode_mcu(j_decompress_ptr image, JBLOCKROW *blocks) {
  State *state = image->client_data;
  if (image->restart_interval && state->mcus_to_restart-- == 0) {
    restart(state, image);
    state->mcus_to_restart--;
  }
  int needed = blocks != NULL && state->column >= state->first_column && state->column < state->end_column;
  if (needed ? read_blocks(state, image, blocks) : read_blocks(state, image, NULL))
    leave((j_common_ptr)image);
  state->mcus_read++;
  if (++state->column == image->MCUs_per_row)
    state->column = 0;
  return TRUE;
}

/* Whether the scan is of the one kind that scan.h reads. */
static int is_usual(const Libjpeg *library, j_decompress_ptr image) {
  return !library->has_multiple_scans(image) && !image->progressive_mode && !image->arith_code &&
         image->data_precision == 8 && (image->num_components == 1 || image->num_components == 3) &&
         image->Ss == 0 && image->Se == DCTSIZE2 - 1 && image->Ah == 0 && image->Al == 0;
}

/* Read the scan of an image by scan.h from now on. `copy` has as many bytes as the image, and PAD more. */
static int take_over(State *state, j_decompress_ptr image, uint8_t *copy) {
  Interval interval = {image->src->next_input_byte, image->src->next_input_byte + image->src->bytes_in_buffer, copy,
                       0, {NULL, NULL, 0, 0}};
  state->interval = interval;
  memset(state->last_dc, 0, sizeof state->last_dc);
  state->column = 0;
  state->mcus_read = 0;
  state->restarts = 0;
  state->mcus_to_restart = image->restart_interval;
  int damaged = next_interval(&state->interval);
  for (int i = 0; i < image->comps_in_scan; i++) {
    int dc = image->cur_comp_info[i]->dc_tbl_no, ac = image->cur_comp_info[i]->ac_tbl_no;
    const JHUFF_TBL *of_dc = image->dc_huff_tbl_ptrs[dc], *of_ac = image->ac_huff_tbl_ptrs[ac];
    damaged |= make_table(&state->dc[dc], of_dc->bits, of_dc->huffval, 1);
    damaged |= make_table(&state->ac[ac], of_ac->bits, of_ac->huffval, 0);
  }
  image->entropy->decode_mcu = decode_mcu;
  return damaged;
}

/* Set up that columns are left out, and note which MCUs that leaves. With CONTEXT the pixels of the part have the
 * neighbours of the whole image when colours are interpolated; and a component of one column would not be. */
static void crop(const Libjpeg *library, State *state, j_decompress_ptr image, Part *part) {
  JDIMENSION x = part->left < CONTEXT ? 0 : part->left - CONTEXT, end = part->left + part->width + CONTEXT;
  JDIMENSION width = (end < image->output_width ? end : image->output_width) - x;
  library->crop(image, &x, &width);
  JDIMENSION of_mcu = (JDIMENSION)image->min_DCT_scaled_size;
  if (image->num_components > 1)
    of_mcu *= (JDIMENSION)image->max_h_samp_factor;
  part->first = x;
  state->first_column = x / of_mcu;
  state->end_column = (x + width + of_mcu - 1) / of_mcu;
}

static void read_rows(const Libjpeg *library, j_decompress_ptr image, const Part *part) {
  size_t stride = ((size_t)part->width + MARGIN) * 3;
  if (part->top)
    library->skip(image, part->top);
  while (image->output_scanline < part->top + part->height) {
    JDIMENSION done = image->output_scanline - part->top, left = part->height - done;
    JSAMPROW rows[ROWS];
    for (JDIMENSION i = 0; i < ROWS && i < left; i++)
      rows[i] = part->out + (done + i) * stride;
    library->read(image, rows, left < ROWS ? left : ROWS);
  }
}

/* Whether the rest of the scan is whole, and the image ends after it. */
static int ends_well(State *state, j_decompress_ptr image) {
  uint64_t mcus = (uint64_t)image->MCUs_per_row * image->MCU_rows_in_scan;
  while (state->mcus_read < mcus)
    decode_mcu(image, NULL);
  return at_end(&state->interval) && state->interval.marker == END_OF_IMAGE;
}

EXPORT int32_t feedline_jpeg_interface(void) { return INTERFACE; }

/* The bytes of a `state` of feedline_jpeg_part: zeros at first. It keeps tables from one image to the next. */
EXPORT size_t feedline_jpeg_state_bytes(void) { return sizeof(State); }

/* Decode a part of a JPEG. DECODE_WHOLE: it is damaged, or unusual. */
EXPORT int32_t feedline_jpeg_part(const Libjpeg *library, State *state, const uint8_t *data, size_t bytes,
                                  Part *part) {
  struct jpeg_decompress_struct image;
  memset(&image, 0, sizeof image);
  image.err = library->std_error(&state->errors);
  image.client_data = state;
  state->errors.error_exit = leave;
  state->errors.emit_message = leave_at_warning;
  if (setjmp(state->leave)) {
    library->destroy(&image);
    return DECODE_WHOLE;
  }
  library->create(&image, JPEG_LIB_VERSION, sizeof image);
  library->mem_src(&image, data, (unsigned long)bytes);
  library->read_header(&image, TRUE);
  image.out_color_space = JCS_RGB;
  image.dct_method = JDCT_ISLOW;
  image.do_fancy_upsampling = TRUE;
  image.scale_num = part->eighths;
  image.scale_denom = 8;
  if (!is_usual(library, &image))
    leave((j_common_ptr)&image);
  library->start(&image);
  if (part->left + part->width > image.output_width || part->top + part->height > image.output_height)
    leave((j_common_ptr)&image);
  uint8_t *copy = image.mem->alloc_large((j_common_ptr)&image, JPOOL_IMAGE, image.src->bytes_in_buffer + PAD);
  if (take_over(state, &image, copy) != FINE)
    leave((j_common_ptr)&image);
  crop(library, state, &image, part);
  read_rows(library, &image, part);
  int whole = ends_well(state, &image);
  library->destroy(&image);
  return whole ? DECODED : DECODE_WHOLE;
}
