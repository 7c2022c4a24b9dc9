/* The configuration of libjpeg-turbo as Pillow and Linux distributions build it: the interface of version 6b. */
#define JPEG_LIB_VERSION 62
#define LIBJPEG_TURBO_VERSION 3.2.0
#define LIBJPEG_TURBO_VERSION_NUMBER 3002000
#define C_ARITH_CODING_SUPPORTED 1
#define D_ARITH_CODING_SUPPORTED 1
#define MEM_SRCDST_SUPPORTED 1
#define WITH_SIMD 1
#ifndef BITS_IN_JSAMPLE
#define BITS_IN_JSAMPLE 8
#endif
