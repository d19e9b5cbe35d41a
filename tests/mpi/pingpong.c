#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int c,char**v){int r,n;MPI_Init(&c,&v);MPI_Comm_rank(MPI_COMM_WORLD,&r);MPI_Comm_size(MPI_COMM_WORLD,&n);
char lib[MPI_MAX_LIBRARY_VERSION_STRING];int l;MPI_Get_library_version(lib,&l);if(!r)printf("%.40s\n",lib);
int max=c>1?atoi(v[1]):1<<20;char*b=malloc(max+1);memset(b,1,max);
for(int s=1;s<=max;s*=4){int it=s>65536?20:500;MPI_Barrier(MPI_COMM_WORLD);double t=MPI_Wtime();
for(int i=0;i<it;i++){if(r==0){MPI_Send(b,s,MPI_CHAR,1,0,MPI_COMM_WORLD);MPI_Recv(b,s,MPI_CHAR,1,0,MPI_COMM_WORLD,MPI_STATUS_IGNORE);}else if(r==1){MPI_Recv(b,s,MPI_CHAR,0,0,MPI_COMM_WORLD,MPI_STATUS_IGNORE);MPI_Send(b,s,MPI_CHAR,0,0,MPI_COMM_WORLD);}}
t=(MPI_Wtime()-t)/it/2;if(!r)printf("%8d B %10.2f us %10.2f MB/s\n",s,t*1e6,s/t/1e6);}
MPI_Finalize();return 0;}
