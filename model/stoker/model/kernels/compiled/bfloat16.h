/* Numbers that are bfloat16 in memory and float in registers. */
#pragma once
#include <stdint.h>

typedef uint16_t bf16;

static inline float wide(bf16 x)
{
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

/* Round to nearest, ties to even. NaN stays NaN. */
static inline bf16 narrow(float x)
{
    union { float value; uint32_t bits; } u = {x};
    uint32_t rounded = (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    return (bf16)((u.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
