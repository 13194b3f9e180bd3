#include "attention_kernels.h"

TB_ATTENTION_KERNEL(tb_attention_amx)
