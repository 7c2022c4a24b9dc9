/* A part of a JPEG as RGB, by libjpeg-turbo, with no more work than the part needs.
 *
 * C11 without the Python API: ctypes loads it and releases the interpreter's lock during each call. This file is not
 * linked with libjpeg-turbo: the caller passes the addresses of its functions, so the library may come with Pillow.
 * No state is kept between calls, so any number of threads may call at a time.
 *
 * Blocks beside the part are not transformed, and what comes after it is not read. An image that is damaged up to
 * there, has no end, or is of an unusual kind, is left to the caller.
 */

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "libjpeg/jpeglib.h"

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
} Errors;

static void leave(j_common_ptr image) { longjmp(((Errors *)image->err)->leave, 1); }

/* A warning (level -1) says that the data are damaged. */
static void leave_at_warning(j_common_ptr image, int level) {
  if (level < 0)
    leave(image);
}

/* Progressive images must be decoded whole before the first row. */
static int is_usual(const Libjpeg *library, j_decompress_ptr image) {
  return !library->has_multiple_scans(image) && !image->arith_code && image->data_precision == 8 &&
         (image->num_components == 1 || image->num_components == 3);
}

/* Whether an image ends with the marker of its end, which one that was cut off does not. */
static int has_end(const uint8_t *data, size_t bytes) {
  return bytes >= 2 && data[bytes - 2] == 0xFF && data[bytes - 1] == 0xD9;
}

/* Set up that columns are left out. With CONTEXT the pixels of the part have the neighbours of the whole image when
 * colours are interpolated; and a component of one column would not be. */
static void crop(const Libjpeg *library, j_decompress_ptr image, Part *part) {
  JDIMENSION x = part->left < CONTEXT ? 0 : part->left - CONTEXT, end = part->left + part->width + CONTEXT;
  JDIMENSION width = (end < image->output_width ? end : image->output_width) - x;
  library->crop(image, &x, &width);
  part->first = x;
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

EXPORT int32_t feedline_jpeg_interface(void) { return INTERFACE; }

/* Decode a part of a JPEG. DECODE_WHOLE: it is damaged, or unusual. */
EXPORT int32_t feedline_jpeg_part(const Libjpeg *library, const uint8_t *data, size_t bytes, Part *part) {
  struct jpeg_decompress_struct image;
  Errors errors;
  if (!has_end(data, bytes))
    return DECODE_WHOLE;
  memset(&image, 0, sizeof image);
  image.err = library->std_error(&errors.errors);
  errors.errors.error_exit = leave;
  errors.errors.emit_message = leave_at_warning;
  if (setjmp(errors.leave)) {
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
  crop(library, &image, part);
  read_rows(library, &image, part);
  library->destroy(&image);
  return DECODED;
}
